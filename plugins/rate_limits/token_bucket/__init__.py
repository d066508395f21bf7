"""A bucket per key and limit that fills evenly."""

from __future__ import annotations

from pydantic import Field

from engine.hooks import hookimpl
from engine.plugin import Offer, Options
from engine.specs.rate_limit import RateLimiter


class TokenBucketOptions(Options):
    """The YAML section."""

    burst_seconds: float = Field(
        60.0, ge=1, le=86400, description="A key that was silent may use at once what it is allowed in so many seconds."
    )


def build(options: TokenBucketOptions) -> RateLimiter:
    """Make the limiter."""
    from engine.plugins.rate_limits.token_bucket.limiter import TokenBucket

    return TokenBucket(options.burst_seconds)


@hookimpl
def rate_limits() -> list[Offer[RateLimiter]]:
    """The limiter that smooths."""
    summary = "A bucket per key that fills evenly: bursts up to its size, then the rate"
    return [Offer(name="token_bucket", summary=summary, build=build, options=TokenBucketOptions)]
