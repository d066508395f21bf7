"""From a request to the token ids that the core computes."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeGuard

from engine.config.model import EngineConfig
from engine.server.conversation import template_messages
from engine.server.errors import bad_request
from engine.server.limits import check_length, check_messages
from engine.server.protocol import ChatRequest, CompletionRequest, Generate, TokenizeRequest
from engine.server.tools import ToolUse

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer

_INLINE_CHARACTERS = 4096
"""More text is tokenized on a thread, so that the event loop goes on serving others."""

_OURS = frozenset({"self", "messages", "tools", "add_generation_prompt", "continue_final_message", "template"})
"""Variables of the template that a request can't set through `chat_template_kwargs`."""


async def encode(
    tokenizer: Tokenizer, texts: Sequence[str], add_special_tokens: bool, max_context: int | None = None
) -> list[list[int]]:
    """Tokenize each text, without holding up the event loop.

    Raises:
        ApiError: 400, soon, when a text can't fit into a context of `max_context` tokens.
    """

    def work() -> list[list[int]]:
        if max_context is not None:
            check_length(tokenizer, texts, max_context)
        return [tokenizer.encode(text, add_special_tokens=add_special_tokens) for text in texts]

    return work() if sum(map(len, texts)) <= _INLINE_CHARACTERS else await asyncio.to_thread(work)


def chat_text(
    tokenizer: Tokenizer,
    messages: Sequence[dict[str, Any]],
    tools: list[dict[str, Any]] | None,
    body: ChatRequest | TokenizeRequest,
    template: str | None,
) -> str:
    """The conversation as the chat template writes it: `template`, or the checkpoint's own.

    Raises:
        ApiError: 400 when messages are malformed or the template refuses them.
    """
    proceed = bool(body.continue_final_message)
    if proceed and body.add_generation_prompt:
        raise bad_request(
            "continue_final_message and add_generation_prompt exclude each other", "continue_final_message"
        )
    if proceed and body.messages and body.messages[-1].get("role") != "assistant":
        raise bad_request("continue_final_message needs a last message of the role assistant", "continue_final_message")
    given = {**_effort(body), **(body.chat_template_kwargs or {})}
    extra = {key: value for key, value in given.items() if key not in _OURS}
    if isinstance(body, ChatRequest) and body.documents is not None:
        extra["documents"] = body.documents
    try:
        return tokenizer.apply_chat_template(
            template_messages(messages),
            tools=tools,
            add_generation_prompt=not proceed and body.add_generation_prompt is not False,
            continue_final_message=proceed,
            template=template,
            **extra,
        )
    except ValueError as error:
        raise bad_request(str(error), "messages") from None


def _effort(body: ChatRequest | TokenizeRequest) -> dict[str, Any]:
    """`reasoning_effort` under the names that templates know; for `none` thinking is turned off."""
    effort = body.reasoning_effort if isinstance(body, ChatRequest) else None
    if effort is None:
        return {}
    return {"reasoning_effort": effort, **({"enable_thinking": False, "thinking": False} if effort == "none" else {})}


def truncated(prompt: list[int], body: Generate, max_context: int) -> list[int]:
    """The last tokens of a prompt, as many as `truncate_prompt_tokens` says; -1 leaves room for the answer.

    Raises:
        ApiError: 400 when it is no possible length.
    """
    keep = body.truncate_prompt_tokens
    if keep is None:
        return prompt
    if keep == -1:
        keep = max(1, max_context - max(1, body.max_tokens or 1))
    if not 1 <= keep <= max_context:
        raise bad_request(
            f"truncate_prompt_tokens must lie between 1 and {max_context}, or be -1, not {keep}",
            "truncate_prompt_tokens",
        )
    return prompt[-keep:]


def _longest(body: Generate, max_context: int) -> int | None:
    """What may be refused for its length; nothing if its beginning is cut off anyway."""
    return max_context if body.truncate_prompt_tokens is None else None


async def chat_prompt(
    tokenizer: Tokenizer, body: ChatRequest, tools: ToolUse, config: EngineConfig, max_context: int
) -> tuple[str, list[int]]:
    """The text and the tokens of a chat request. Raises as `chat_text` and `encode` do."""
    check_messages(body.messages, config.server.max_messages)
    text = chat_text(tokenizer, body.messages, tools.shown, body, config.model.chat_template)
    (prompt,) = await encode(tokenizer, [text], bool(body.add_special_tokens), _longest(body, max_context))
    return text, truncated(prompt, body, max_context)


def split_prompts(prompt: str | list[Any], vocab_size: int) -> list[str] | list[list[int]]:
    """The prompts of a completion request: one text, texts, one list of token ids, or lists of token ids.

    Raises:
        ApiError: 400 for an empty or mixed list, or ids outside the vocabulary.
    """
    if isinstance(prompt, str):
        return [prompt]
    if not prompt:
        raise bad_request("prompt must not be an empty list", "prompt")
    if _are_ids(prompt):
        return [_within(prompt, vocab_size)]
    if all(isinstance(item, str) for item in prompt):
        return list(prompt)
    if all(isinstance(item, list) and _are_ids(item) for item in prompt):
        return [_within(item, vocab_size) for item in prompt]
    raise bad_request(
        "prompt must be a string, a list of strings, a list of token ids or a list of such lists", "prompt"
    )


async def completion_prompts(
    tokenizer: Tokenizer, prompts: list[str] | list[list[int]], body: CompletionRequest, max_context: int
) -> tuple[list[list[int]], list[str]]:
    """The tokens of each prompt, and the text that echoes it: texts come back as they were sent, if they are whole."""
    texts = [prompt for prompt in prompts if isinstance(prompt, str)]
    given = [prompt for prompt in prompts if isinstance(prompt, list)]
    if texts:
        given = await encode(tokenizer, texts, body.add_special_tokens is not False, _longest(body, max_context))
    ids = [truncated(prompt, body, max_context) for prompt in given]
    if texts and ids == given:
        return ids, texts
    return ids, [tokenizer.decode(prompt, skip_special_tokens=False) for prompt in ids]


def _are_ids(items: list[Any]) -> TypeGuard[list[int]]:
    return all(type(item) is int for item in items)  # a bool is no id


def _within(ids: list[int], vocab_size: int) -> list[int]:
    for token in ids:
        if not 0 <= token < vocab_size:
            raise bad_request(
                f"prompt has token {token}, but the ids of this model go from 0 to {vocab_size - 1}", "prompt"
            )
    return ids


def room(prompt: Sequence[int], asked: int | None, min_tokens: int, max_context: int) -> int:
    """How many tokens may follow the prompt: what was asked for, within the context.

    Raises:
        ApiError: 400 when the prompt is empty or leaves no room, or when less fits than `min_tokens`.
    """
    if not prompt:
        raise bad_request("the prompt is empty; it must have at least one token", "prompt")
    left = max_context - len(prompt)
    if left < 1:
        raise bad_request(
            f"the prompt has {len(prompt)} tokens, but the maximum context length is {max_context} tokens, "
            "prompt and answer together; shorten the prompt",
            "prompt",
        )
    if min_tokens > left:
        raise bad_request(
            f"min_tokens is {min_tokens}, but after {len(prompt)} prompt tokens only {left} of the context of "
            f"{max_context} are left",
            "min_tokens",
        )
    return left if asked is None else min(asked, left)


__all__ = ["chat_prompt", "chat_text", "completion_prompts", "encode", "room", "split_prompts", "truncated"]
