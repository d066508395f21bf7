"""What a request makes the core do: which prompts, which choices, how to sample each."""

from __future__ import annotations

import uuid
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import msgspec

from engine.bad_words import with_bad_words
from engine.config.model import EngineConfig
from engine.detokenizer import Detokenizer
from engine.messages import Ready
from engine.sampling_params import SamplingParams
from engine.server.errors import bad_request
from engine.server.generation import Job
from engine.server.kv_handover import transfer_params
from engine.server.prompts import room
from engine.server.protocol import Generate
from engine.server.reading import PLAIN, Reading
from engine.server.sampling import with_seed
from engine.text import ChoiceText, Delta

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer

_PRIORITIES = range(-(2**31), 2**31)


@dataclass(slots=True, kw_only=True)
class Usage:
    """Tokens of a request, over all its choices; a prompt counts once however many choices it has."""

    prompt_tokens: int
    completion_tokens: int = 0
    cached_tokens: int = 0
    reasoning_tokens: int = 0
    _seen: set[int] = field(default_factory=set)

    def add(self, delta: Delta, n: int) -> None:
        """Count a delta of a request with n choices per prompt."""
        self.completion_tokens += len(delta.token_ids)
        self.reasoning_tokens += delta.reasoning_tokens
        if delta.index % n == 0 and delta.index not in self._seen and (delta.token_ids or delta.finish_reason):
            self._seen.add(delta.index)
            self.cached_tokens += delta.cached_tokens

    def as_dict(self) -> dict[str, Any]:
        """OpenAI's object."""
        details = {"completion_tokens_details": {"reasoning_tokens": self.reasoning_tokens}}
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
            **(details if self.reasoning_tokens else {}),
        }


def choices(
    body: Generate,
    tokenizer: Tokenizer,
    ready: Ready,
    prompts: Sequence[list[int]],
    params: SamplingParams,
    config: EngineConfig,
    reading: Reading = PLAIN,
    width: int | None = None,
) -> list[tuple[Job, ChoiceText]]:
    """One job of the core for every choice: k prompts times n, the choices of one prompt side by side.

    Args:
        width: choices per prompt, if not the `n` of the request.

    Raises:
        ApiError: 400 when a prompt doesn't fit, or more answers are asked for than can be queued.
    """
    n = width or choices_per_prompt(body, config.server.max_n)
    params = with_bad_words(params, tokenizer)
    check_count(len(prompts) * n, ready)
    priority = _priority(body.priority)
    transfer = _transfer(transfer_params(body), {connector.role for connector in config.kv_connectors})
    batch = uuid.uuid4().hex
    kept = reading.kept_tokens(tokenizer)
    made = []
    for i, prompt in enumerate(prompts):
        fitted = _fitted(params, prompt, ready.max_context)
        for j in range(n):
            job = Job(
                index=i * n + j,
                request_id=f"{batch}-{i * n + j}",
                prompt=prompt,
                params=with_seed(fitted, j),
                priority=priority,
                cache_salt=body.cache_salt or "",
                kv_transfer=transfer,
            )
            detokenizer = Detokenizer(tokenizer, params.skip_special_tokens, kept)
            eos = frozenset(tokenizer.eos_token_ids)
            text = ChoiceText(job.index, params, detokenizer, eos, reading.thoughts())
            made.append((job, text))
    return made


def choices_per_prompt(body: Generate, max_n: int) -> int:
    """The field `n`, checked."""
    n = 1 if body.n is None else body.n
    if not 1 <= n <= max_n:
        raise bad_request(f"n must lie between 1 and {max_n}, not {n}", "n")
    return n


def check_count(answers: int, ready: Ready) -> None:
    """Refuse a request whose answers could never be queued together."""
    most = ready.max_running + ready.max_waiting
    if answers > most:
        raise bad_request(
            f"prompt and n ask for {answers} answers at once, but at most {most} can be queued here", "prompt"
        )


def check_common(body: Generate) -> None:
    """Refuse what both routes can't do. Raises a 400 naming the field."""
    if body.stream_options is not None and not body.stream:
        raise bad_request("stream_options is only allowed together with stream: true", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise bad_request("prompt_logprobs can't be streamed; leave stream out", "prompt_logprobs")


def _fitted(params: SamplingParams, prompt: list[int], max_context: int) -> SamplingParams:
    """With a bound on the tokens that fits the context. The core makes at least one; asked for none, it is dropped."""
    tokens = max(1, room(prompt, params.max_tokens, params.min_tokens, max_context))
    return msgspec.structs.replace(params, max_tokens=tokens)


def _priority(priority: int | None) -> int:
    if priority is not None and priority not in _PRIORITIES:
        raise bad_request("priority must fit into 32 bits", "priority")
    return priority or 0


def _transfer(fields: dict[str, Any] | None, roles: Set[str]) -> dict[str, Any] | None:
    """The parameters of a transfer; the core judges the handle, which only its connectors understand."""
    if fields is None:
        return None
    for flag, role in (("do_remote_decode", "producer"), ("do_remote_prefill", "consumer")):
        if fields.get(flag) and not roles & {role, "both"}:
            raise bad_request(
                f"kv_transfer_params asks for {flag}, but this server has no KV connector with the role {role} or both",
                "kv_transfer_params",
            )
    try:
        msgspec.msgpack.encode(fields)
    except (OverflowError, RecursionError, msgspec.MsgspecError):
        raise bad_request("kv_transfer_params holds a number beyond 64 bits", "kv_transfer_params") from None
    return fields


__all__ = ["Usage", "check_common", "check_count", "choices", "choices_per_prompt"]
