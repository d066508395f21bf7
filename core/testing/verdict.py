"""From what the checks of one offer showed to a verdict on each of its claims."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from engine.capabilities import Capabilities
from engine.testing.claims import ANY, claims_of, proven_by


class Outcome(StrEnum):
    """How a check ended, and what it means for a claim."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"
    UNCHECKED = "unchecked"  # a claim that no check of the kit is about, or whose checks did not all run to their end


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """One check as it ran."""

    suite: str
    check: str  # name of the function
    case: str  # with its parameters
    claims: Sequence[str]
    outcome: Outcome
    reason: str
    seconds: float

    @staticmethod
    def read(record: str) -> list[Check]:
        """From what the pytest plugin wrote: lines of JSON, of which the last about a check counts."""
        lines = [json.loads(line) for line in record.splitlines() if line.endswith("}")]  # one may be cut off
        found = {line.pop("node"): line for line in lines}
        return [Check(**one | {"outcome": Outcome(one["outcome"])}) for one in found.values()]


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """On one claim of an offer."""

    claim: str
    outcome: Outcome
    passed: int
    failed: int
    skipped: int
    why: str


def verdicts(capabilities: Capabilities, checks: Sequence[Check]) -> list[Verdict]:
    """One for each claim, in the order of `claims_of`.

    A claim fails with any check about it, stays open where one did not run to its end, and passes with one that passed
    and none that failed. `field:any` is listed
    only where a check is about it, for most fields mean nothing to most extension points.
    """
    claimed = claims_of(capabilities)
    about: dict[str, list[Check]] = {claim: [] for claim in claimed}
    for check in checks:
        for claim in proven_by(check.claims, claimed):
            about[claim].append(check)
    return [_verdict(claim, found) for claim, found in about.items() if found or not claim.endswith(f":{ANY}")]


def _verdict(claim: str, checks: Sequence[Check]) -> Verdict:
    passed, failed, skipped, left = (
        [check for check in checks if check.outcome is outcome]
        for outcome in (Outcome.PASSED, Outcome.FAILED, Outcome.SKIPPED, Outcome.UNCHECKED)
    )
    if failed:
        outcome, why = Outcome.FAILED, ", ".join(dict.fromkeys(check.check for check in failed))
    elif left:
        outcome, why = Outcome.UNCHECKED, f"{left[0].case} {left[0].reason.removeprefix('it ')}"
    elif passed:
        outcome, why = Outcome.PASSED, ""
    elif skipped:
        outcome, why = Outcome.SKIPPED, skipped[0].reason
    else:
        outcome, why = Outcome.UNCHECKED, "no check of the kit is about it"
    return Verdict(claim=claim, outcome=outcome, passed=len(passed), failed=len(failed), skipped=len(skipped), why=why)


__all__ = ["Check", "Outcome", "Verdict", "verdicts"]
