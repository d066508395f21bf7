"""Conformance of rate limiters: what is let through stays within the rate, and nobody is shut out."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.specs.rate_limit import Rate, RateLimiter
from engine.testing.offer import OfferConformance

CALLS = st.lists(st.tuples(st.floats(0, 20), st.integers(1, 400)), min_size=1, max_size=40)  # pause, prompt tokens
RATES = st.builds(
    Rate, requests=st.one_of(st.none(), st.floats(1, 600)), tokens=st.one_of(st.none(), st.floats(60, 6000))
)


class RateLimitConformance(OfferConformance):
    """Subclasses set `offer` and `module`."""

    longest_burst: float = 60.0
    """Seconds whose allowance a key that was silent may use at once."""

    def limiter(self) -> RateLimiter:
        """A limiter with the options of the suite."""
        limiter = self.offer.build(self.options())
        assert isinstance(limiter, RateLimiter)
        return limiter

    def test_no_more_than_the_rate_passes(self) -> None:
        """Over any stretch from the start: the allowance of that time, one burst, and the last prompt."""

        @settings(max_examples=100, deadline=None, database=None)
        @given(CALLS, RATES)
        def check(calls: list[tuple[float, int]], rate: Rate) -> None:
            limiter, now, requests, tokens = self.limiter(), 100.0, 0, 0
            for pause, size in calls:
                now += pause
                if limiter.begin("a", rate, size, now).allowed:
                    requests, tokens = requests + 1, tokens + size
                minutes = (now - 100.0 + self.longest_burst) / 60
                assert rate.requests is None or requests <= max(1.0, rate.requests * minutes) + 1
                assert rate.tokens is None or tokens <= rate.tokens * minutes + size + 400

        check()

    def test_who_waits_as_long_as_was_said_gets_through(self) -> None:
        """And not much earlier: a client that comes back halfway is refused again."""

        @settings(max_examples=100, deadline=None, database=None)
        @given(CALLS, RATES, st.integers(0, 5000))
        def check(calls: list[tuple[float, int]], rate: Rate, output: int) -> None:
            limiter, now = self.limiter(), 0.0
            for _, size in calls:
                verdict = limiter.begin("a", rate, size, now)
                if verdict.allowed:
                    assert verdict.retry_after == 0
                    limiter.spend("a", rate, output, now)
                    continue
                assert verdict.retry_after > 0
                assert not limiter.begin("a", rate, size, now + verdict.retry_after / 2).allowed
                now += verdict.retry_after + 1e-3
                assert limiter.begin("a", rate, size, now).allowed

        check()

    def test_a_prompt_above_the_limit_passes_when_nothing_was_used(self) -> None:
        """Else it never would."""
        assert self.limiter().begin("a", Rate(tokens=100), 10**6, 0.0).allowed

    def test_output_is_charged(self) -> None:
        """To the request after it."""
        limiter, rate = self.limiter(), Rate(tokens=600)
        assert limiter.begin("a", rate, 10, 0.0).allowed
        limiter.spend("a", rate, 1200, 1.0)
        verdict = limiter.begin("a", rate, 10, 1.0)
        assert not verdict.allowed
        assert verdict.tokens is not None
        assert verdict.tokens.remaining == 0

    def test_keys_do_not_share(self) -> None:
        """Each has an account of its own."""
        limiter, rate = self.limiter(), Rate(requests=1)
        while limiter.begin("a", rate, 1, 0.0).allowed:
            pass
        assert limiter.begin("b", rate, 1, 0.0).allowed

    def test_without_a_limit_everything_passes(self) -> None:
        """And there is nothing to tell."""
        verdict = self.limiter().begin("a", Rate(), 10**9, 0.0)
        assert verdict.allowed
        assert (verdict.requests, verdict.tokens) == (None, None)

    def test_what_is_told_adds_up(self) -> None:
        """Remaining is within the limit, and the reset is when all of it is back."""
        limiter, rate = self.limiter(), Rate(requests=60, tokens=6000)
        for i in range(1, 5):
            verdict = limiter.begin("a", rate, 100, 0.0)
            for found, used in ((verdict.requests, i), (verdict.tokens, 100 * i)):
                assert found is not None
                assert found.remaining == found.limit - used
                assert found.reset > 0


__all__ = ["RateLimitConformance"]
