"""Where the prompt of a request is computed: by an engine of the prefill pool, or by the one that answers."""

from __future__ import annotations

import logging
from collections import Counter
from dataclasses import dataclass
from typing import Any, Final

from engine.cost_model import Measured, Side, Weigher
from engine.server.router.config import HandoverSection
from engine.server.router.worker import Worker

log = logging.getLogger(__name__)

_BYTES_PER_TOKEN: Final = 4.0
"""Until answers have said how long prompts are."""

_NEWEST: Final = 0.1
"""Weight of the newest prompt in the mean of bytes per token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prompt:
    """What the router knows of a prompt."""

    size: int  # bytes of its text
    blocks: tuple[bytes, ...]


class Planner:
    """Decides, remembers how often it decided what, and learns how many bytes a token has."""

    def __init__(self, section: HandoverSection) -> None:
        self._mode = section.mode
        self._weigher = Weigher(section.stall_weight)
        self._bytes_per_token = _BYTES_PER_TOKEN
        self.decided: Counter[str] = Counter()

    def remote(self, request_id: str, prompt: Prompt, prefill: Worker | None, decode: Worker) -> bool:
        """Whether `prefill` should compute the prompt for `decode`; logs why."""
        if prefill is None or self._mode == "never":
            self.decided["local: no prefill engine" if prefill is None else "local: by configuration"] += 1
            return False
        if self._mode == "always":
            self.decided["remote: by configuration"] += 1
            return True
        choice = self._weigher.choose(
            self.tokens(prompt),
            here=self._side(decode, prompt),
            there=self._side(prefill, prompt),
            link=Measured.of(decode.load.get("fetch")),
            streams=decode.active,
        )
        where = "remote" if choice.remote else "local"
        self.decided[f"{where}: {choice.why.partition(',')[0]}"] += 1
        log.info(
            "request %s: prompt of about %d tokens computed at %s, %s (%s against %s)",
            request_id,
            self.tokens(prompt),
            prefill.url if choice.remote else decode.url,
            choice.why,
            f"{_shown(choice.remote_seconds)} there",
            f"{_shown(choice.local_seconds)} here",
        )
        return choice.remote

    def tokens(self, prompt: Prompt) -> int:
        """About how many tokens a prompt has."""
        return max(1, round(prompt.size / self._bytes_per_token))

    def seconds(self, worker: Worker, prompt: Prompt) -> float:
        """How long a worker will probably compute the prompt; 0 when that isn't known."""
        side = self._side(worker, prompt)
        return side.prefill.seconds(max(1, self.tokens(prompt) - side.cached)) or 0.0

    def learn(self, prompt: Prompt, tokens: int) -> None:
        """An engine has counted the tokens of a prompt."""
        if tokens > 0:
            self._bytes_per_token += _NEWEST * (prompt.size / tokens - self._bytes_per_token)

    def row(self) -> dict[str, Any]:
        """For people; JSON values only."""
        return {"mode": self._mode, "bytes_per_token": self._bytes_per_token, "decided": dict(self.decided)}

    def _side(self, worker: Worker, prompt: Prompt) -> Side:
        share = worker.seen.matched(prompt.blocks) / len(prompt.blocks) if prompt.blocks else 0.0
        cached = int(self.tokens(prompt) * share)
        return Side(prefill=Measured.of(worker.load.get("prefill")), cached=cached, queue=worker.owed)


def _shown(seconds: float | None) -> str:
    return "unknown" if seconds is None else f"{seconds * 1e3:.0f} ms"


__all__ = ["Planner", "Prompt"]
