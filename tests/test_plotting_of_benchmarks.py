"""`benchmarks/plot.py` reads what the benchmarks write."""

from __future__ import annotations

import importlib.util
import json
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

PLOT = Path(__file__).parents[1] / "benchmarks" / "plot.py"
ROWS = [
    {"requests": 4, "context": 128, "step_seconds": 0.02, "tokens_per_second": 200.0},
    {"requests": 1, "context": 128, "step_seconds": 0.01, "tokens_per_second": 100.0},
]
GROWTH = {
    "title": "a model",
    "requests": ROWS,
    "contexts": [{**ROWS[1], "context": 1000}, {**ROWS[1], "context": 2000}],
}
BENCH = {"model": "served", "runs": [{"concurrency": 2, "output_tokens_per_second": 50.0, "itl": {"p50": 0.03}}]}


@pytest.fixture
def plot(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    spec = importlib.util.spec_from_file_location("plot_of_benchmarks", PLOT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, module)
    spec.loader.exec_module(module)
    return module


def write(folder: Path, name: str, data: object) -> Path:
    path = folder / name
    path.write_text(json.dumps(data))
    return path


def test_both_kinds_of_results_become_lines(plot: ModuleType, tmp_path: Path) -> None:
    growth, bench = (plot.read(write(tmp_path, name, data)) for name, data in (("g", GROWTH), ("b", BENCH)))
    assert growth.rate_by_requests == [(1, 100.0), (4, 200.0)]
    assert growth.step_by_context == [(1000, 0.01), (2000, 0.01)]
    assert (bench.label, bench.rate_by_requests) == ("served over HTTP", [(2, 50.0)])
    assert bench.step_by_requests == [(2, 0.03)]
    assert not bench.rate_by_context
    with pytest.raises(ValueError, match=r"odd.*neither"):
        plot.read(write(tmp_path, "odd", [1]))


def test_a_picture_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib", reason="the extra dev brings matplotlib")
    files = [write(tmp_path, "g.json", GROWTH), write(tmp_path, "b.json", BENCH)]
    out = tmp_path / "growth.png"
    subprocess.run([sys.executable, PLOT, *files, "--out", out], check=True, capture_output=True)
    data = out.read_bytes()
    assert data.startswith(b"\x89PNG")
    assert len(data) > 10_000
