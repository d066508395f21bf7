"""The Grafana dashboard asks for metrics that the server has."""

from __future__ import annotations

import json
import re
from dataclasses import asdict
from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from engine.messages import Timing
from engine.server.exchange import Run
from engine.server.metrics import Metrics
from engine.speculation.controller import Controller
from engine.speculation.counters import DraftCounters

DASHBOARD = json.loads((Path(__file__).parents[2] / "examples" / "dashboards" / "grafana.json").read_text())


def exposed() -> dict[str, set[str]]:
    """Every sample's name with its labels, of a server with a speculator that answered a request."""
    metrics = Metrics("tiny")
    watch = metrics.begin(Run("a", 3, 0.0, 5))
    watch.output(1, 0, None)
    watch.output(2, 0, Timing(0.1, 0.2, 0.3))
    watch.end("stop")
    metrics.answered(200)
    cache = dict.fromkeys(("pages", "held", "lookup_tokens", "hit_tokens", "evicted_pages"), 1)
    counters = DraftCounters(4)
    counters.count(100, 4, 2)
    drafts = {**asdict(counters), "controller": Controller(4, 0.01).stats()}
    core = {"kv_cache": cache, "preemptions": 0, "steps": 1, "drafts": drafts, "transfers": [], "transfers_ended": {}}
    families = text_string_to_metric_families(metrics.expose(0, 0, core).decode())
    return {sample.name: set(sample.labels) for family in families for sample in family.samples}


def test_every_expression_names_metrics_and_labels_that_there_are() -> None:
    known = exposed()
    expressions = [target["expr"] for panel in DASHBOARD["panels"] for target in panel["targets"]]
    expressions += [v["query"] for v in DASHBOARD["templating"]["list"] if v["type"] == "query"]
    assert len(expressions) > 20
    for expression in expressions:
        names = re.findall(r"\bengine_\w+", expression)
        assert names, expression
        assert set(names) <= set(known), expression
        labels = set(re.findall(r"(\w+)=~", expression)) | {
            label for group in re.findall(r"by \(([^)]*)\)", expression) for label in re.split(r",\s*", group)
        }
        assert labels - {"instance"} <= set().union(*(known[name] for name in names)), expression


def test_every_legend_names_a_label_that_the_expression_keeps() -> None:
    for panel in DASHBOARD["panels"]:
        for target in panel["targets"]:
            for label in re.findall(r"{{(\w+)}}", target["legendFormat"]):
                assert f"by ({label})" in target["expr"], target


def test_the_panels_do_not_overlap() -> None:
    taken: set[tuple[int, int]] = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert max(x for x, _ in cells) < 24
        taken |= cells
