from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st

from engine.plugin import Options
from engine.server.cli import bench
from engine.server.cli.bench_command import command
from engine.server.cli.endpoint import EndpointError
from engine.server.cli.workload import Report, Sample, Workload, percentiles
from engine.testing.client import say


def workload(**fields: Any) -> Workload:
    defaults: dict[str, Any] = {
        "requests": 4,
        "prompt_tokens": 20,
        "max_tokens": 5,
        "shared_prefix": 0.0,
        "concurrency": 2,
        "rate": None,
        "ignore_eos": True,
        "chat": False,
        "seed": 1,
    }
    return Workload(**{**defaults, **fields})


def test_the_plugin_module_is_light() -> None:
    code = (
        "import sys, engine.server.cli.bench; print(sorted({'torch', 'rich', 'click', 'fastapi'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"
    (offer,) = bench.cli_commands()
    assert offer.build(Options()) is command
    assert offer.name == command.name


def test_prompts_share_their_beginning_and_are_reproducible() -> None:
    prompts = [prompt.split() for prompt in workload(shared_prefix=0.75).prompts()]
    assert {len(words) for words in prompts} == {20}
    assert len({tuple(words[:15]) for words in prompts}) == 1
    assert len({tuple(words[15:]) for words in prompts}) == 4
    assert [" ".join(words) for words in prompts] == list(workload(shared_prefix=0.75).prompts())
    assert list(workload(seed=2).prompts()) != list(workload().prompts())
    assert len(set(workload(shared_prefix=1.0).prompts())) == 1


def test_arrivals_have_the_rate_on_average() -> None:
    times = list(workload(requests=4000, rate=10.0).arrivals())
    assert times == sorted(times)
    assert times[-1] == pytest.approx(400, rel=0.1)
    assert set(workload().arrivals()) == {0.0}


@given(st.lists(st.floats(0, 1e6), min_size=1))
def test_percentiles_are_ordered_and_within(values: list[float]) -> None:
    found = percentiles(values)
    assert found is not None
    assert min(values) <= found["p50"] <= found["p90"] <= found["p99"] <= max(values)


def test_percentiles_by_hand() -> None:
    found = percentiles([4.0, 1.0, 2.0, 3.0])
    assert found is not None
    assert (found["p50"], found["mean"]) == (2.5, 2.5)
    assert percentiles([]) is None


def test_a_summary_by_hand() -> None:
    good = Sample(10.0, [11.0, 11.5, 13.0], 13.0, prompt_tokens=7, cached_tokens=2, output_tokens=3)
    row = Report(workload(), [good, Sample(10.0, error="refused")], 4.0).summary()
    assert (row["requests"], row["failed"], row["errors"]) == (2, 1, ["refused"])
    assert (row["ttft"]["p50"], row["tpot"]["p50"], row["e2e"]["p50"]) == (1.0, 1.0, 3.0)
    assert (row["itl"]["p50"], row["itl"]["mean"]) == (1.0, 1.0)
    assert (row["output_tokens_per_second"], row["total_tokens_per_second"]) == (0.75, 2.5)


def test_tokens_without_text_are_no_failure() -> None:
    silent = Sample(10.0, [], 14.0, prompt_tokens=5, output_tokens=8)
    row = Report(workload(), [silent], 4.0).summary()
    assert (row["failed"], row["output_tokens_per_second"], row["e2e"]["p50"]) == (0, 2.0, 4.0)
    assert row["ttft"] is row["itl"] is row["tpot"] is None


@pytest.mark.parametrize("chat", [False, True])
def test_against_a_server(serving: Any, tmp_path: Path, chat: bool) -> None:
    live = serving(say(list(b"abc")))
    out = tmp_path / "numbers.json"
    options = ["--url", live.base, "--concurrency", "1,3", "--num-requests", "6", "--prompt-tokens", "10"]
    more = ["--max-tokens", "5", "--json", str(out), "--shared-prefix", "0.5", *(["--chat"] if chat else [])]
    result = CliRunner().invoke(command, [*options, *more])
    assert result.exit_code == 0, result.output
    assert "tiny at" in result.output
    data = json.loads(out.read_text())
    assert [run["concurrency"] for run in data["runs"]] == [1, 3]
    for run in data["runs"]:
        assert (run["requests"], run["failed"], run["output_tokens"]) == (6, 0, 30)
        assert run["ttft"]["p50"] > 0
        assert run["prompt_tokens"] > 6 * 10
    assert len(live.core.calls) == 12
    assert all(call.params.ignore_eos for call in live.core.calls)


def test_failures_are_counted_and_told(live: Any) -> None:
    result = CliRunner().invoke(command, ["--url", live.base, "--prompt-tokens", "500", "--num-requests", "2"])
    assert isinstance(result.exception, EndpointError)
    assert "maximum context length" in " ".join(result.output.split())


@pytest.mark.parametrize("levels", ["0", "1,x", "", "1,,2"])
def test_bad_levels(levels: str) -> None:
    result = CliRunner().invoke(command, ["--concurrency", levels])
    assert result.exit_code == 2
    assert "whole numbers above 0" in result.output


def test_a_trace_has_the_lanes_of_both_processes(serving: Any, tmp_path: Path) -> None:
    keys = "server.api_keys=[{key: boss, scopes: [infer, admin]}, {key: guest}]"
    live, out = serving(overrides=(keys,)), tmp_path / "trace.json"
    spans = [["engine", "wait", 5.0, 5.9, 1], ["device", "step", 5.0, 5.4, 1], ["device", "step", 5.5, 6.0, 2]]

    async def control(verb: str, on: bool) -> dict[str, Any]:
        assert verb == "trace"
        return {"on": True} if on else {"spans": spans}

    live.core.control = control
    load = ["--num-requests", "2", "--prompt-tokens", "10", "--max-tokens", "5"]
    options = ["--url", live.base, *load, "--trace", str(out)]
    result = CliRunner().invoke(command, [*options, "--api-key", "boss"])
    assert result.exit_code == 0, result.output
    assert "the device was busy 90.0% of the time over 2 steps" in result.output
    found = json.loads(out.read_text())["traceEvents"]
    lanes = {(e["pid"], e["tid"]): e["args"]["name"] for e in found if e["ph"] == "M"}
    named = Counter((lanes[e["pid"], 0], lanes[e["pid"], e["tid"]], e["name"]) for e in found if e["ph"] == "X")
    assert named.pop(("HTTP", "http", "detokenize")) >= 2
    assert named == {("engine core", "engine", "wait"): 1, ("engine core", "device", "step"): 2}
    assert live.state.tracer.stop() == []
    refused = CliRunner().invoke(command, [*options, "--api-key", "guest"])
    assert isinstance(refused.exception, EndpointError)
    assert "403" in str(refused.exception)
