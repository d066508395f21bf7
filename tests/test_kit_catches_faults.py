"""The conformance kit is tested by plugins with one fault each: every one is caught, by the check that is meant for it.

A module of `broken_plugins` names in `CAUGHT_BY` the check that must fail and, where the fault breaks a few claims
alone, in `FAILS` the claims that may. All of them go through one pytest run of their own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from engine.testing.suites import SUITES
from engine.testing.verdict import Check, Outcome, verdicts

FOLDER = Path(__file__).parent / "broken_plugins"
FAULTS = sorted(path.stem for path in FOLDER.glob("*.py") if path.stem not in ("broken_parts", "run_faults"))


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> list[Check]:
    """What every check of every faulty plugin showed."""
    folder = tmp_path_factory.mktemp("faults")
    (folder / "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
    command = [sys.executable, "-m", "pytest", "-c", "pytest.ini", "--rootdir", str(folder), "-p", "no:cacheprovider"]
    command += ["-q", "--tb=no", "-Wignore", "--engine-record=record.jsonl", str(FOLDER / "run_faults.py")]
    environment = os.environ | {"PYTHONPATH": str(FOLDER)}
    run = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 1, run.stdout + run.stderr
    return Check.read((folder / "record.jsonl").read_text())


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught_by_the_right_check(name: str, found: list[Check], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(FOLDER))
    module = import_module(name)
    checks = [check for check in found if check.suite == f"Test_{name}"]
    failed = {check.check for check in checks if check.outcome is Outcome.FAILED}
    assert module.CAUGHT_BY in failed, f"{module.__doc__} Only {sorted(failed)} failed."
    assert any(check.outcome is Outcome.PASSED for check in checks), "nothing passed: the plugin is no plugin at all"
    hook = next(hook for hook in SUITES if hasattr(module, hook))
    (offer,) = getattr(module, hook)()
    claims = {v.claim for v in verdicts(offer.capabilities, checks) if v.outcome is Outcome.FAILED}
    assert claims <= getattr(module, "FAILS", claims), "other claims fail too"


def test_there_are_faults_for_the_extension_points() -> None:
    texts = [(FOLDER / f"{name}.py").read_text() for name in FAULTS]
    covered = {hook for hook in SUITES if any(f"def {hook}(" in text for text in texts)}
    assert SUITES.keys() - covered <= {"grammars", "rate_limits", "reasoning_parsers", "tool_parsers"}
    assert len(FAULTS) >= 50
