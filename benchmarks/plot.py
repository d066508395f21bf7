"""Draws how throughput and step time grow with the number of requests and with the context.

    python benchmarks/plot.py FILE.json … --out growth.png

Reads what `benchmarks/growth.py --json` and `engine bench --json` write; each file is a line. Of `engine bench` the
output tokens per second and the median gap between tokens are drawn. Takes matplotlib, which the extra `dev` brings.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Line:
    """One file: throughput in tokens a second and step time in seconds, by requests at once and by context."""

    label: str
    rate_by_requests: Points
    step_by_requests: Points
    rate_by_context: Points = ()
    step_by_context: Points = ()


def read(path: Path) -> Line:
    """One results file.

    Raises:
        ValueError: it is of no kind that is known here.
    """
    data = json.loads(path.read_text())
    if isinstance(data, dict) and "contexts" in data:
        by_requests, by_context = data["requests"], data["contexts"]
        return Line(
            data["title"],
            _points(by_requests, "requests", "tokens_per_second"),
            _points(by_requests, "requests", "step_seconds"),
            _points(by_context, "context", "tokens_per_second"),
            _points(by_context, "context", "step_seconds"),
        )
    if isinstance(data, dict) and "runs" in data:
        gaps = [(run["concurrency"], run["itl"]["p50"]) for run in data["runs"] if run["itl"] is not None]
        return Line(
            f"{data['model']} over HTTP", _points(data["runs"], "concurrency", "output_tokens_per_second"), gaps
        )
    raise ValueError(f"{path} is neither of benchmarks/growth.py nor of engine bench")


def _points(rows: Sequence[dict[str, Any]], x: str, y: str) -> Points:
    return sorted((row[x], row[y]) for row in rows)


def draw(lines: Sequence[Line], out: Path) -> None:
    """Four panels, both axes logarithmic: what grows in proportion is straight."""
    import matplotlib

    matplotlib.use("agg")
    from matplotlib import pyplot

    panels = (
        ("requests at once", "output tokens a second", [line.rate_by_requests for line in lines], 1.0),
        ("requests at once", "step, ms", [line.step_by_requests for line in lines], 1e3),
        ("tokens of context, one request", "output tokens a second", [line.rate_by_context for line in lines], 1.0),
        ("tokens of context, one request", "step, ms", [line.step_by_context for line in lines], 1e3),
    )
    figure, axes = pyplot.subplots(2, 2, figsize=(11, 8), layout="constrained")
    for axis, (x, y, series, scale) in zip(axes.flat, panels, strict=True):
        for line, points in zip(lines, series, strict=True):
            if points:
                axis.plot([p[0] for p in points], [p[1] * scale for p in points], "o-", label=line.label)
        ticks = sorted({p[0] for points in series for p in points})
        if ticks:
            axis.set(xscale="log", yscale="log")
            axis.set_xticks(ticks, [f"{tick / 1000:g}k" if tick >= 1000 else f"{tick:g}" for tick in ticks])
            axis.minorticks_off()
            axis.legend()
        axis.set(xlabel=x, ylabel=y)
        axis.grid(alpha=0.3)
    figure.savefig(out, dpi=110)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", nargs="+", type=Path)
    parser.add_argument("--out", type=Path, default=Path("growth.png"))
    given = parser.parse_args()
    draw([read(path) for path in given.files], given.out)
    print(given.out)


if __name__ == "__main__":
    main()
