"""POST /v1/chat/completions: the request, checked and brought to the core."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from engine.server.chat_reply import ChatReply
from engine.server.errors import bad_request
from engine.server.events import News, read_events
from engine.server.generation import generate
from engine.server.plan import check_common, choices
from engine.server.prompts import chat_prompt
from engine.server.protocol import ChatRequest
from engine.server.reading import Reading
from engine.server.sampling import sampling_params
from engine.server.state import ServerState
from engine.server.tools import tool_use

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer

_MAX_TOP_LOGPROBS = 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """An admitted request. Nothing is computed until the news are asked for; closing them aborts the request."""

    news: AsyncGenerator[News]
    prompt: list[int]
    n: int  # choices
    tokenizer: Tokenizer
    kv_action: str | None = None  # what the client does with the KV


async def answer(state: ServerState, body: ChatRequest) -> AsyncGenerator[bytes]:
    """Check the request and prepare its body.

    Raises:
        ApiError: when the request is refused.
    """
    turn = await begin(state, body)
    reply = ChatReply(state.model, turn.tokenizer, body, turn.prompt, turn.n)
    return reply.stream(turn.news) if body.stream else reply.whole(turn.news)


async def begin(state: ServerState, body: ChatRequest) -> Turn:
    """Check the request and prepare what it makes the core do. Other APIs convert their requests and begin here too.

    Raises:
        ApiError: when the request is refused.
    """
    ready, tokenizer = state.admit(body.model)
    check_common(body)
    _refuse(body)
    tools = tool_use(body.tools, body.tool_choice, body.parallel_tool_calls)
    params = sampling_params(
        body,
        max_tokens=body.max_tokens if body.max_completion_tokens is None else body.max_completion_tokens,
        logprobs=_alternatives(body),
        prompt_logprobs=body.prompt_logprobs,
        vocab_size=tokenizer.vocab_size,
        max_stop=state.config.server.max_stop,
    )
    text, prompt = await chat_prompt(tokenizer, body, tools, state.config, ready.max_context)
    reading = Reading(
        parsers=state.parsers,
        tools=tools,
        prompt=text,
        begun=_begun(body),
        show_reasoning=body.include_reasoning is not False,
        constraints=state.config.grammar.use != "none",
    )
    jobs = choices(body, tokenizer, ready, [prompt], reading.constrained(params), state.config, reading)
    news = read_events(generate(state, jobs), [reading.reader() for _ in jobs])
    return Turn(news=news, prompt=prompt, n=len(jobs), tokenizer=tokenizer, kv_action=body.kv_transfer_action)


def _refuse(body: ChatRequest) -> None:
    if body.echo:
        raise bad_request("echo is a field of /v1/completions; chat answers don't repeat the prompt", "echo")
    if body.chat_template is not None:
        raise bad_request(
            "a request can't bring its own chat_template; the server's configuration may", "chat_template"
        )
    if any(kind != "text" for kind in body.modalities or ()):
        raise bad_request("modalities other than text are not possible: this model writes text only", "modalities")


def _begun(body: ChatRequest) -> str:
    """The text that the answer goes on with, if it does."""
    content = body.messages[-1].get("content") if body.continue_final_message else None
    return content if isinstance(content, str) else ""


def _alternatives(body: ChatRequest) -> int | None:
    top = body.top_logprobs
    if top is not None and not body.logprobs:
        raise bad_request("top_logprobs needs logprobs: true", "top_logprobs")
    if top is not None and not 0 <= top <= _MAX_TOP_LOGPROBS:
        raise bad_request(f"top_logprobs must lie between 0 and {_MAX_TOP_LOGPROBS}, not {top}", "top_logprobs")
    return (top or 0) if body.logprobs else None


__all__ = ["Turn", "answer", "begin"]
