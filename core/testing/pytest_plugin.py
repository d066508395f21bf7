"""The pytest plugin of the conformance kit: the marker, the fixtures, and the record of what each check showed.

Installed with the engine (entry point `engine_testing`); it is imported by every pytest run, so it imports nothing of
the engine's until it is used.
"""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

_OTHERS = sorted(path.stem for path in Path(__file__).parent.glob("*.py") if path != Path(__file__))

# So that pytest explains the assertions of the suites as it does those of test files.
pytest.register_assert_rewrite(*(f"engine.testing.{name}" for name in _OTHERS if name != "__init__"))


def pytest_addoption(parser: pytest.Parser) -> None:
    """The file that `engine plugins check` reads."""
    group = parser.getgroup("engine", "conformance of engine plugins")
    group.addoption("--engine-record", metavar="FILE", help="write what every check showed to FILE, as lines of JSON")


def pytest_configure(config: pytest.Config) -> None:
    """Register the marker, and the recorder when a record is wanted."""
    config.addinivalue_line("markers", "proves(claim, ...): the claims of an offer that a check proves")
    if path := config.getoption("--engine-record"):
        config.pluginmanager.register(Recorder(Path(path)), "engine-recorder")


class Recorder:
    """Writes down the outcome of every check as soon as it ends, so that a run that is killed leaves what it found.

    A line per check when it is collected and another when it has ended; the later one counts.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._path.write_text("")
        self._found: dict[str, dict[str, Any]] = {}

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Note what each check is about."""
        for item in items:
            self._found[item.nodeid] = {
                "node": item.nodeid,
                "suite": item.parent.name if item.parent else "",
                "check": getattr(item, "originalname", None) or item.name,
                "case": item.name,
                "claims": [claim for mark in item.iter_markers("proves") for claim in mark.args],
                "outcome": "unchecked",
                "reason": "it did not run to its end",
                "seconds": 0.0,
            }
        self._write(self._found.values())

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A failure anywhere is a failure; a skip says why."""
        found = self._found[report.nodeid]
        found["seconds"] += report.duration
        if (report.outcome != "passed" or report.when == "call") and found["outcome"] != "failed":
            found["outcome"], found["reason"] = report.outcome, _reason(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        """The check has ended."""
        self._write([self._found[nodeid]])

    def _write(self, found: Iterable[dict[str, Any]]) -> None:
        with self._path.open("a") as file:
            file.writelines(f"{json.dumps(one)}\n" for one in found)


def _reason(report: pytest.TestReport) -> str:
    """Why a check was skipped, or the last line of what it raised."""
    if report.passed:
        return ""
    if isinstance(report.longrepr, tuple):
        return str(report.longrepr[2]).removeprefix("Skipped: ")
    crash = getattr(report.longrepr, "reprcrash", None)
    return str(crash.message if crash else report.longrepr).strip()


@pytest.fixture(scope="session")
def tiny_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A maker of tiny Hugging Face folders: architecture -> path, made once a session, random weights in float32."""
    from engine.testing.checkpoints import tiny_model

    made: dict[str, Path] = {}

    def make(architecture: str) -> Path:
        if architecture not in made:
            model = tiny_model(architecture)
            if model is None:
                pytest.skip(f"transformers can't make a small {architecture}")
            made[architecture] = tmp_path_factory.mktemp(architecture)
            with warnings.catch_warnings(action="ignore"):  # what transformers thinks of its own defaults
                model.save_pretrained(made[architecture])
        return made[architecture]

    return make


@pytest.fixture
def one_thread() -> Iterator[None]:
    """One thread for torch: many small tensors are computed faster by one than by several that wait for each other."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
