"""Token buckets. A bucket may owe, since output tokens are known only when they are there; the next request waits."""

from __future__ import annotations

from dataclasses import dataclass

from engine.specs.rate_limit import Allowance, Rate, RateLimiter, Verdict


@dataclass(slots=True)
class Bucket:
    """Holds up to `size` units and gains `speed` of them a second."""

    size: float
    speed: float
    level: float
    time: float

    def fill(self, now: float) -> None:
        """Gain what the time since the last call brings."""
        self.level = min(self.size, self.level + self.speed * max(0.0, now - self.time))
        self.time = now

    def wait(self, amount: float) -> float:
        """Seconds until `amount` may be taken; of more than the size, when it is full."""
        return max(0.0, min(amount, self.size) - self.level) / self.speed

    def allowance(self) -> Allowance:
        """How it stands."""
        return Allowance(limit=self.size, remaining=max(0.0, self.level), reset=(self.size - self.level) / self.speed)


class TokenBucket(RateLimiter):
    """Two buckets per key, each as large as what is allowed in `burst_seconds`, but never less than one request."""

    def __init__(self, burst_seconds: float) -> None:
        self._burst = burst_seconds
        self._accounts: dict[str, tuple[Bucket | None, Bucket | None]] = {}

    def begin(self, key: str, rate: Rate, tokens: int, now: float) -> Verdict:
        requests, budget = self._buckets(key, rate, now)
        wait = max(requests.wait(1) if requests else 0.0, budget.wait(tokens) if budget else 0.0)
        if wait == 0.0:
            for bucket, amount in ((requests, 1), (budget, tokens)):
                if bucket is not None:
                    bucket.level -= amount
        return Verdict(
            allowed=wait == 0.0,
            retry_after=wait,
            requests=requests.allowance() if requests else None,
            tokens=budget.allowance() if budget else None,
        )

    def spend(self, key: str, rate: Rate, tokens: int, now: float) -> None:
        _, budget = self._buckets(key, rate, now)
        if budget is not None:
            budget.level -= tokens

    def _buckets(self, key: str, rate: Rate, now: float) -> tuple[Bucket | None, Bucket | None]:
        """The buckets of a key, filled up to now; a new key's are full."""
        if key not in self._accounts:
            self._accounts[key] = self._bucket(rate.requests, now), self._bucket(rate.tokens, now)
        found = self._accounts[key]
        for bucket in found:
            if bucket is not None:
                bucket.fill(now)
        return found

    def _bucket(self, per_minute: float | None, now: float) -> Bucket | None:
        if per_minute is None:
            return None
        size = max(1.0, per_minute * self._burst / 60)
        return Bucket(size=size, speed=per_minute / 60, level=size, time=now)


__all__ = ["Bucket", "TokenBucket"]
