"""`engine plugins check`: built-ins pass end to end, a stranger's false claim is found, and mistakes get a sentence."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from engine.errors import ConfigError, EngineError, PluginError, ResourceError
from engine.server.cli import check as command
from engine.server.cli.plugins import group
from engine.testing.verdict import Check

ROOT = Path(__file__).parents[1]

BOASTER = '''
"""A quantization that says it loses nothing."""
from dataclasses import replace
from engine.hooks import hookimpl
from engine.plugin import Capabilities, Flag, Offer

def build(options, *, device, dtype):
    from engine.testing.checkpoints import PlainLinear, PlainQuantization

    class Rounded(PlainQuantization):
        def linear(self, source, names, bias=(), device=None):
            dense = super().linear(source, names, bias, device)
            return PlainLinear((dense._weight * 50).round() / 50, dense._bias)

    return Rounded(dtype)

@hookimpl
def quantizations():
    flags = frozenset({Flag.LOSSLESS, Flag.GRAPH_SAFE})
    return [Offer(name="boaster", summary="says it loses nothing", build=build, capabilities=Capabilities(flags=flags))]
'''


@pytest.fixture
def site(tmp_path: Path) -> Path:
    """A folder with an installed distribution `boaster`, as pip would lay it out."""
    facts = tmp_path / "boaster-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: boaster\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text("[engine]\nboaster = boaster_plugin\n[engine.api]\nhooks = v1\n")
    (tmp_path / "boaster_plugin.py").write_text(BOASTER)
    return tmp_path


def engine(*arguments: str, site: Path | None = None) -> subprocess.CompletedProcess[str]:
    code = "from engine.server.cli.main import main; main()"
    return subprocess.run(
        [sys.executable, "-c", code, "plugins", "check", *arguments],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | ({"PYTHONPATH": str(site)} if site else {}),
    )


def test_built_ins_pass_with_a_verdict_per_claim(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    done = engine("none", "--point", "quantization", "--report", str(path))
    assert done.returncode == 0, done.stdout + done.stderr
    assert "none: quantization of engine-llm" in done.stdout
    (result,) = json.loads(path.read_text())
    outcomes = {verdict["claim"]: verdict["outcome"] for verdict in result["verdicts"]}
    assert outcomes["contract"] == outcomes["flags:lossless"] == outcomes["dtypes:any"] == "passed"


def test_a_plugin_is_checked_with_all_that_it_offers() -> None:
    done = engine("scheduling.fcfs")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "fcfs: scheduling policy of engine-llm" in done.stdout


def test_a_false_claim_of_a_stranger_is_found_and_an_unchecked_one_named(site: Path, tmp_path: Path) -> None:
    done = engine("boaster", "--report", str(tmp_path / "report.md"), site=site)
    assert done.returncode == 1, done.stdout + done.stderr
    page = (tmp_path / "report.md").read_text()
    assert "| failed | test_lossless_equals_the_dense_product, test_lossless_experts_equal_the_dense_sum |" in page
    assert "test_lossless_equals_the_dense_product[float32]" in done.stdout
    assert "| unchecked | no check of the kit is about it |" in page
    assert "| `dtypes:any` | " in page


def test_an_unknown_name_is_an_error_with_a_hint() -> None:
    result = CliRunner().invoke(group, ["check", "radx"])
    assert isinstance(result.exception, PluginError)
    assert "nothing named 'radx' is installed" in str(result.exception)
    assert "did you mean 'radix'?" in str(result.exception)
    result = CliRunner().invoke(group, ["check", "radix", "--point", "executor"])
    assert "no executor named 'radix' is installed" in str(result.exception)


def test_a_missing_tool_is_named_with_the_way_to_get_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "find_spec", lambda name: None)
    result = CliRunner().invoke(group, ["check", "radix"])
    assert isinstance(result.exception, ResourceError)
    assert "needs pytest and hypothesis, but pytest and hypothesis are not installed" in str(result.exception)
    assert "`pip install pytest hypothesis`" in str(result.exception)


def test_a_run_that_does_not_end_is_given_up() -> None:
    result = CliRunner().invoke(group, ["check", "fcfs", "--timeout", "0.01"])
    assert isinstance(result.exception, EngineError)
    assert "the checks did not end within 0.01 s" in str(result.exception)
    assert "not checked: the time was up before its checks began" in result.output


def test_what_was_found_before_the_time_was_up_is_shown(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def given_up(command: list[str], **how: object) -> None:
        record = next(one for one in command if one.startswith("--engine-record=")).partition("=")[2]
        one = {"suite": "TestOffer0", "claims": [], "reason": "", "seconds": 1.0}
        quick = {"node": "1", "check": "test_quick", "case": "test_quick", "outcome": "passed"}
        slow = {"node": "2", "check": "test_slow", "case": "test_slow", "outcome": "unchecked"}
        Path(record).write_text(f'{json.dumps(one | quick)}\n{json.dumps(one | slow)}\n{{"cut o')
        raise subprocess.TimeoutExpired(command, 9, output=b"test_offers.py::TestOffer0::test_slow ")

    monkeypatch.setattr(subprocess, "run", given_up)
    report = tmp_path / "report.json"
    result = CliRunner().invoke(group, ["check", "fcfs", "--timeout", "9", "--report", str(report)])
    assert str(result.exception).endswith("the last one was TestOffer0::test_slow")
    assert "2 checks, 0 failed, 1 not run to their end" in result.output
    assert json.loads(report.read_text())[0]["verdicts"][0]["outcome"] == "unchecked"


def test_a_run_that_is_killed_leaves_what_it_found(tmp_path: Path) -> None:
    (tmp_path / "pytest.ini").write_text("[pytest]\n")
    tests = "import os\nclass TestIt:\n    def test_one(self): pass\n    def test_two(self): os._exit(9)\n"
    (tmp_path / "test_it.py").write_text(tests)
    command = [sys.executable, "-m", "pytest", "-q", "--engine-record=record.jsonl", "test_it.py"]
    assert subprocess.run(command, cwd=tmp_path, capture_output=True, check=False).returncode == 9
    found = Check.read((tmp_path / "record.jsonl").read_text())
    assert {check.check: check.outcome for check in found} == {"test_one": "passed", "test_two": "unchecked"}


@pytest.mark.parametrize("seconds", ["nan", "-1", "0", "inf"])
def test_a_time_that_is_none_is_refused(seconds: str) -> None:
    result = CliRunner().invoke(group, ["check", "fcfs", "--timeout", seconds])
    assert result.exit_code == 2
    assert "is no time to wait; give seconds above 0" in result.output


def test_a_report_without_a_folder_is_refused(tmp_path: Path) -> None:
    result = CliRunner().invoke(group, ["check", "fcfs", "--report", str(tmp_path / "no/x.json")])
    assert isinstance(result.exception, ConfigError)
    assert "there is no folder" in str(result.exception)
