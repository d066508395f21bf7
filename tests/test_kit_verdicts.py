"""From the outcomes of checks to a verdict per claim, and the reports that are made of it."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from engine.capabilities import Capabilities, Flag, Mask
from engine.errors import ConfigError
from engine.hooks import hookimpl
from engine.plugin import Offer
from engine.registry import Registry
from engine.testing import report
from engine.testing.check import Checked
from engine.testing.claims import claims_of, proven_by, some
from engine.testing.verdict import Check, Outcome, Verdict, verdicts

CAN = Capabilities(
    devices=frozenset({"cpu"}),
    min_compute_capability=(8, 0),
    head_dims=frozenset(range(16, 513, 16)),
    masks=frozenset({Mask.CAUSAL, Mask.TREE}),
    flags=frozenset({Flag.GRAPH_SAFE}),
)


def a_check(name: str, *claims: str, outcome: Outcome = Outcome.PASSED, reason: str = "") -> Check:
    return Check(suite="TestIt", check=name, case=name, claims=claims, outcome=outcome, reason=reason, seconds=0.25)


def test_every_declared_value_is_a_claim_and_so_is_the_absence_of_a_limit() -> None:
    claims = claims_of(CAN)
    assert claims[0] == "contract"
    assert {"devices:cpu", "dtypes:any", "masks:causal", "masks:tree", "flags:graph_safe"} <= set(claims)
    assert "min_compute_capability:8.0" in claims
    assert "head_dims:16, 32, …, 512" in claims
    assert not {"masks:any", "flags:any"} & set(claims), "an empty set of abilities claims nothing"


@pytest.mark.parametrize(
    ("marks", "claims"),
    [
        ([], ["contract"]),
        (["masks:tree"], ["masks:tree"]),
        (["masks:sliding_window"], []),
        (["masks"], ["masks:causal", "masks:tree"]),
        (["masks", "masks:tree"], ["masks:tree"]),
        (["dtypes:float16"], ["dtypes:any"]),
        (["head_dims:64"], ["head_dims:16, 32, …, 512"]),
        (["contract", "flags:graph_safe"], ["contract", "flags:graph_safe"]),
    ],
)
def test_marks_lead_to_claims(marks: list[str], claims: list[str]) -> None:
    assert proven_by(marks, claims_of(CAN)) == claims


def test_of_many_values_both_ends_and_some_between_are_tried() -> None:
    assert some(frozenset(range(16, 513, 16)), (), most=4) == [16, 176, 336, 512]
    assert some(frozenset(), (1, 2)) == [1, 2]
    assert some(frozenset({16, 1024}), (), up_to=64) == [16]
    assert some(frozenset({512, 1024}), (), up_to=64) == [512]


def test_a_claim_fails_with_one_check_and_is_open_without_any() -> None:
    checks = [
        a_check("one"),
        a_check("two", "masks:tree"),
        a_check("three", "masks:tree", outcome=Outcome.FAILED, reason="no"),
        a_check("four", "devices:cpu", outcome=Outcome.SKIPPED, reason="not here"),
    ]
    found = {v.claim: (v.outcome, v.why) for v in verdicts(CAN, checks)}
    assert found["contract"] == (Outcome.PASSED, "")
    assert found["masks:tree"] == (Outcome.FAILED, "three")
    assert found["devices:cpu"] == (Outcome.SKIPPED, "not here")
    assert found["flags:graph_safe"] == (Outcome.UNCHECKED, "no check of the kit is about it")
    assert "dtypes:any" not in found, "nobody asked about dtypes"


def test_a_claim_is_open_while_one_of_its_checks_has_not_ended() -> None:
    left = a_check("slow", outcome=Outcome.UNCHECKED, reason="it did not run to its end")
    (found,) = [v for v in verdicts(CAN, [a_check("quick"), left]) if v.claim == "contract"]
    assert (found.outcome, found.why) == (Outcome.UNCHECKED, "slow did not run to its end")
    bad = a_check("bad", outcome=Outcome.FAILED)
    assert verdicts(CAN, [bad, left])[0].outcome is Outcome.FAILED


@pytest.fixture
def results() -> list[Checked]:
    class Plugin:
        @hookimpl
        def kv_caches(self) -> list[Offer[object]]:
            return [Offer(name="mine", summary="a cache", build=lambda options: None)]

    owned = Registry.of({"mine": Plugin()}, distribution="my-package").get("kv_caches", "mine")
    checks = [a_check("good"), a_check("bad", outcome=Outcome.FAILED, reason="assert 1 == 2\n  more")]
    checks.append(a_check("left", outcome=Outcome.SKIPPED, reason="no GPU"))
    return [Checked("kv_caches", owned, checks, verdicts(owned.offer.capabilities, checks))]


def test_a_report_is_json_junit_or_markdown_by_its_suffix(results: list[Checked], tmp_path: Path) -> None:
    for suffix in report.FORMATS:
        report.write(results, tmp_path / f"report{suffix}")
    (plain,) = json.loads((tmp_path / "report.json").read_text())
    assert (plain["name"], plain["point"], plain["distribution"]) == ("mine", "kv_caches", "my-package")
    assert Verdict(**plain["verdicts"][0]).outcome == "failed"
    suite = ElementTree.parse(tmp_path / "report.xml").getroot()[0]
    assert (suite.get("tests"), suite.get("failures"), suite.get("skipped")) == ("3", "1", "1")
    assert [case.get("name") for case in suite] == ["good", "bad", "left"]
    assert suite[1][0].get("message") == "assert 1 == 2"
    page = (tmp_path / "report.md").read_text()
    assert "## mine: KV cache of my-package 0" in page
    assert "| `contract` | 1 | 1 | 1 | failed | bad |" in page


def test_a_report_that_cannot_be_written_is_refused_before_anything_runs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"can't tell the format of the report out.pdf; .* \.json, \.xml, \.md"):
        report.require_place(Path("out.pdf"))
    with pytest.raises(ConfigError, match=r"can't be written: there is no folder .*missing; make it first"):
        report.require_place(tmp_path / "missing/out.json")
