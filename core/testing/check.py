"""Runs the conformance suites of installed offers in a pytest run of its own, and says what became of each claim."""

from __future__ import annotations

import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engine.errors import EngineError, ResourceError
from engine.registry import Owned, noun
from engine.testing.suites import device_of
from engine.testing.verdict import Check, Outcome, Verdict, verdicts

_PROBLEM = 2  # exit codes of pytest from here on mean that it could not run at all


@dataclass(frozen=True, slots=True)
class Checked:
    """What became of one offer."""

    hook: str
    owned: Owned[Any]
    checks: list[Check]
    verdicts: list[Verdict]
    objection: str = ""  # why it can't be checked on this machine

    @property
    def failed(self) -> bool:
        """Whether a claim doesn't hold."""
        return any(verdict.outcome is Outcome.FAILED for verdict in self.verdicts)

    @property
    def title(self) -> str:
        """Name and kind, for a heading."""
        return f"{self.owned.offer.name}: {noun(self.hook)} of {self.owned.entry.owner}"


class OutOfTimeError(EngineError):
    """The run was given up; `results` is what there was until then."""

    def __init__(self, message: str, results: Sequence[Checked]) -> None:
        super().__init__(message)
        self.results = results


def check(wanted: Sequence[tuple[str, Owned[Any]]], timeout: float) -> list[Checked]:
    """Hold each offer (its hook and where it comes from) to the suite of its extension point.

    Args:
        timeout: seconds after which the whole run is given up.

    Raises:
        OutOfTimeError: it did not end in time; the sentence names the check that ran.
        EngineError: pytest could not run; the sentence says what it said last.
    """
    objections = {at: _objection(owned) for at, (_, owned) in enumerate(wanted)}
    possible = {f"TestOffer{at}": it for at, it in enumerate(wanted) if not objections[at]}
    found, running = _run({name: (hook, owned.offer.name) for name, (hook, owned) in possible.items()}, timeout)
    results = []
    for at, (hook, owned) in enumerate(wanted):
        checks = [one for one in found if one.suite == f"TestOffer{at}"]
        objection = objections[at] or ("" if checks or not running else "the time was up before its checks began")
        judged = [] if objection else verdicts(owned.offer.capabilities, checks)
        results.append(Checked(hook, owned, checks, judged, objection))
    if running:
        raise OutOfTimeError(f"the checks did not end within {timeout:g} s; the last one was {running}", results)
    return results


def _objection(owned: Owned[Any]) -> str:
    """Why an offer can't be checked as it is: it can't run here, or an option must be given."""
    needed = [name for name, field in owned.offer.options.model_fields.items() if field.is_required()]
    if needed:
        return f"its options {', '.join(needed)} have no default; set them in a test class of your own (`options`)"
    try:
        return owned.offer.available(device_of(owned.offer)) or ""
    except ResourceError as error:
        return str(error)


def _run(classes: dict[str, tuple[str, str]], timeout: float) -> tuple[list[Check], str]:
    """Class name -> hook and offer; the record of a pytest run over a file with these classes.

    And the check that ran when the time was up, or nothing.
    """
    if not classes:
        return [], ""
    with tempfile.TemporaryDirectory(prefix="engine-check-") as folder:
        record, tests = Path(folder, "record.jsonl"), Path(folder, "test_offers.py")
        lines = [f"{name} = installed({hook!r}, {offer!r})" for name, (hook, offer) in classes.items()]
        tests.write_text("\n".join(["from engine.testing.suites import installed", "", *lines, ""]))
        Path(folder, "pytest.ini").write_text("[pytest]\naddopts = --import-mode=importlib\n")
        command = [
            sys.executable,
            "-m",
            "pytest",
            "-p",
            "engine_testing",
            "-p",
            "no:cacheprovider",
            "-v",
            "-W",
            "ignore",
        ]
        command += ["-c", "pytest.ini", "--rootdir", folder, f"--engine-record={record}", tests.name]
        try:
            done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=timeout, check=False)
        except subprocess.TimeoutExpired as error:
            said = error.stdout.decode(errors="replace") if error.stdout else ""
            return (Check.read(record.read_text()) if record.exists() else []), _last(said)
        if done.returncode >= _PROBLEM or not record.exists():
            raise EngineError(f"pytest could not run the checks:\n{(done.stdout + done.stderr).strip()}")
        return Check.read(record.read_text()), ""


def _last(output: str) -> str:
    lines = [line for line in output.splitlines() if "::" in line]
    return lines[-1].partition("::")[2].strip() if lines else "none: none was begun"


__all__ = ["Checked", "OutOfTimeError", "check"]
