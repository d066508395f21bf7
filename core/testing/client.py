"""An engine core for tests of the HTTP side: says what it was told to, in the pieces it was told to."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.messages import FinishReason, Output, Phase, Ready, TokenLogprobs
from engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Call:
    """One request that reached the core."""

    request_id: str
    prompt: list[int]
    params: SamplingParams
    priority: int
    cache_salt: str
    kv_transfer: dict[str, Any] | None
    tenant: str = ""
    weight: float = 1.0


Script = Callable[[Call], Sequence[Output]]
"""What a request is answered; `request_id` of the outputs is filled in."""


def say(tokens: Sequence[int], *, eos: int | None = None, size: int = 1) -> Script:
    """Generate these tokens, `size` in an output, then the end token if one is given; otherwise over and over again.

    Bounded by `max_tokens`. Log-probabilities are made up: -0.5 for the choice and -1, -2, … for its rivals.
    """

    def script(call: Call) -> list[Output]:
        limit = call.params.max_tokens or 1
        stream = [*tokens, eos] if eos is not None else list(tokens) * (limit // max(1, len(tokens)) + 1)
        taken = stream[:limit]
        outputs = []
        for start in range(0, len(taken), size):
            piece = taken[start : start + size]
            last = start + size >= len(taken)
            reason = FinishReason.STOP if piece[-1] == eos else FinishReason.LENGTH
            outputs.append(
                Output(
                    "",
                    token_ids=piece,
                    logprobs=scores(piece, call.params.logprobs),
                    prompt_logprobs=_prompt_scores(call) if start == 0 else None,
                    finish_reason=reason if last else None,
                )
            )
        return outputs

    return script


def scores(tokens: Sequence[int], alternatives: int | None) -> list[TokenLogprobs] | None:
    """Made-up log-probabilities: the token itself is the best, its rivals are the ids from 65 on."""
    if alternatives is None:
        return None
    made = []
    for token in tokens:
        rivals = [token, *(other for other in range(65, 65 + alternatives) if other != token)][:alternatives]
        values = [-0.5 - i for i in range(len(rivals))]
        made.append(TokenLogprobs([token, *rivals], [-0.5, *values], 1))
    return made


def _prompt_scores(call: Call) -> list[TokenLogprobs | None] | None:
    made = scores(call.prompt[1:], call.params.prompt_logprobs)
    return None if made is None else [*made]


@dataclass
class ScriptedClient:
    """Looks to the server like `engine.client.EngineClient`.

    `gate` (open by default) holds every output back while it is cleared, so that tests can look at a running request.
    """

    script: Script
    ready: Ready | None = field(default_factory=lambda: Ready(256, 64, 16, 4, 8, {}))
    phase: Phase = field(default_factory=lambda: Phase("ready", 1.0))
    failed: str | None = None
    running: int = 0
    waiting: int = 0
    calls: list[Call] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    controls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    gate: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self.gate.set()

    async def generate(
        self,
        prompt: list[int],
        params: SamplingParams,
        *,
        request_id: str,
        priority: int = 0,
        cache_salt: str = "",
        kv_transfer: dict[str, Any] | None = None,
        tenant: str = "",
        weight: float = 1.0,
    ) -> AsyncGenerator[Output]:
        """Play the script; closing the generator early counts as an abort."""
        call = Call(request_id, prompt, params, priority, cache_salt, kv_transfer, tenant, weight)
        self.calls.append(call)
        self.running += 1
        finished = False
        try:
            for output in self.script(call):
                await asyncio.sleep(0)
                await self.gate.wait()
                finished = output.finish_reason is not None
                yield output
        finally:
            self.running -= 1
            if not finished:
                self.aborted.append(request_id)

    async def control(self, verb: str, **arguments: Any) -> dict[str, Any]:
        """Numbers of an engine that has done nothing; what was asked for is kept."""
        self.controls.append((verb, arguments))
        if verb != "stats":
            answers: dict[str, dict[str, Any]] = {"reset_cache": {"pages": 3}, "trace": {"spans": []}}
            return answers.get(verb, {})
        cache = dict.fromkeys(("free", "cached", "held", "lookup_tokens", "hit_tokens", "evicted_pages"), 0)
        return {
            "kv_cache": {"pages": 64, **cache},
            "preemptions": 0,
            "steps": 0,
            "drafts": {},
            "transfers": [],
            "transfers_ended": {},
            "fetch": {"points": [], "age": None, "token_bytes": 0},
        }


__all__ = ["Call", "Script", "ScriptedClient", "say", "scores"]
