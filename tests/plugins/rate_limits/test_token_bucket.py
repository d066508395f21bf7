from __future__ import annotations

import pytest

from engine.plugins.rate_limits import token_bucket
from engine.specs.rate_limit import Rate
from engine.testing.rate_limit import RateLimitConformance


class TestTokenBucket(RateLimitConformance):
    (offer,) = token_bucket.rate_limits()
    module = "engine.plugins.rate_limits.token_bucket"


def test_a_burst_then_the_rate() -> None:
    limiter = token_bucket.build(token_bucket.TokenBucketOptions(burst_seconds=10))
    rate = Rate(requests=60)  # one a second, ten at once
    passed = [limiter.begin("a", rate, 1, t / 10).allowed for t in range(200)]
    assert sum(passed[:10]) == 10
    assert sum(passed) == 10 + 19  # and one for each second that went by


def test_the_slower_of_the_two_limits_decides() -> None:
    limiter = token_bucket.build(token_bucket.TokenBucketOptions(burst_seconds=1))
    rate = Rate(requests=60, tokens=600)
    assert limiter.begin("a", rate, 10, 0.0).allowed
    verdict = limiter.begin("a", rate, 10, 0.0)
    assert verdict.retry_after == pytest.approx(1.0)
    limiter.spend("a", rate, 50, 0.0)
    assert limiter.begin("a", rate, 10, 1.0).retry_after == pytest.approx(5.0)


def test_a_rate_below_one_a_burst_still_lets_one_through() -> None:
    limiter = token_bucket.build(token_bucket.TokenBucketOptions(burst_seconds=1))
    assert limiter.begin("a", Rate(requests=1), 1, 0.0).allowed
    assert limiter.begin("a", Rate(requests=1), 1, 30.0).retry_after == pytest.approx(30.0)
