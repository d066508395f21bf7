from __future__ import annotations

import itertools
import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import pytest

from engine import LLM, SamplingParams
from engine.testing.tokenizer import save_byte_tokenizer
from engine.trace import MOST_SPANS, Span, Tracer, busy, chrome_trace

MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 264,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": True,
    "eos_token_id": 256,
}


def check_lanes(spans: Sequence[Span]) -> None:
    """In each lane a span begins after the one before, or lies within it."""
    lanes: dict[str, list[Span]] = defaultdict(list)
    for span in spans:
        assert span.began <= span.ended
        lanes[span.lane].append(span)
    for lane in lanes.values():
        around: list[Span] = []
        for span in sorted(lane, key=lambda s: (s.began, -s.ended)):
            while around and around[-1].ended <= span.began:
                around.pop()
            assert not around or span.ended <= around[-1].ended, f"{span} overlaps {around[-1]}"
            around.append(span)


class Stepper:
    """A device clock that reads moments later than they were taken."""

    def __init__(self) -> None:
        self._ticks = itertools.count()
        self.begun = 0

    def start(self) -> None:
        self.begun += 1

    def stamp(self) -> int:
        return next(self._ticks)

    def seconds(self, stamp: int) -> float:
        return 100.0 + stamp


def test_nothing_is_recorded_unless_started() -> None:
    tracer = Tracer()
    idle = tracer.span("engine", "schedule", 1)
    assert tracer.span("device", "step", 2) is idle
    with idle, idle:
        pass
    assert tracer.stop() == []


def test_spans_are_recorded_between_start_and_stop() -> None:
    tracer = Tracer()
    tracer.start()
    for step in (1, 2):
        with tracer.span("engine", "schedule", step):
            pass
        with pytest.raises(KeyError), tracer.span("device", "step", step), tracer.span("device", "forward", step):
            raise KeyError
    spans = tracer.stop()
    assert [(s.lane, s.name, s.step) for s in spans[:3]] == [
        ("engine", "schedule", 1),
        ("device", "forward", 1),
        ("device", "step", 1),
    ]
    check_lanes(spans)
    with tracer.span("engine", "schedule", 3):
        pass
    assert tracer.stop() == []
    tracer.start()
    assert tracer.stop() == []


def test_the_device_has_a_clock_of_its_own() -> None:
    clock = Stepper()
    tracer = Tracer(clock)
    tracer.start()
    assert clock.begun == 1
    for step in (1, 2):
        with tracer.span("device", "step", step):
            pass
    assert tracer.stop() == [Span("device", "step", 100.0, 101.0, 1), Span("device", "step", 102.0, 103.0, 2)]


def test_memory_is_bounded_and_the_newest_stay() -> None:
    tracer = Tracer()
    tracer.start()
    for step in range(MOST_SPANS + 10):
        with tracer.span("engine", "schedule", step):
            pass
    spans = tracer.stop()
    assert (len(spans), spans[0].step, spans[-1].step) == (MOST_SPANS, 10, MOST_SPANS + 9)


def test_the_file_has_microseconds_and_names() -> None:
    engine = [Span("engine", "wait", 5.0, 5.5, 3), Span("device", "step", 5.1, 5.4, 3)]
    events = chrome_trace({"core": engine, "HTTP": [Span("http", "detokenize", 6.0, 6.001, 0)]})["traceEvents"]
    names = {(e["pid"], e["tid"]): e["args"]["name"] for e in events if e["ph"] == "M"}
    assert names == {(1, 0): "core", (1, 1): "engine", (1, 2): "device", (2, 0): "HTTP", (2, 1): "http"}
    wait, step, text = (e for e in events if e["ph"] == "X")
    assert (wait["name"], wait["ts"], wait["dur"], wait["args"]) == ("wait", 0.0, pytest.approx(5e5), {"step": 3})
    assert (step["tid"], step["ts"]) == (2, pytest.approx(1e5))
    assert (text["pid"], text["args"]) == (2, {})
    assert chrome_trace({})["traceEvents"] == []


@pytest.mark.parametrize("overlap", [True, False])
def test_an_engine_tells_all_lanes_of_each_step(tmp_path: Path, overlap: bool) -> None:
    (tmp_path / "config.json").write_text(json.dumps(MODEL))
    save_byte_tokenizer(tmp_path)
    overrides = [f"model.source=path:{tmp_path}", "model.loader=dummy", "device.threads=1", "kv_cache.pages=64"]
    with LLM(overrides=[*overrides, "model.dtype=float32", f"scheduler.overlap={overlap}".lower()]) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
        llm.engine.tracer.start()
        traced = llm.generate(["one", "another"], params)
        spans = llm.engine.tracer.stop()
        assert [c.text for c in llm.generate(["one", "another"], params)] == [c.text for c in traced]
    check_lanes(spans)
    for step in range(1, 9):
        names = [(s.lane, s.name) for s in spans if s.step == step]
        assert len(names) == len(set(names))
        assert set(names) == {
            *(("engine", name) for name in ("schedule", "launch", "wait", "commit")),
            ("runner", "pack"),
            *(("device", name) for name in ("step", "forward", "sample")),
        }
    begun = {(s.name, s.step): s.began for s in spans}
    for step in range(1, 8):  # the next step is launched before the result of this one is waited for, or after
        assert (begun["launch", step + 1] < begun["wait", step]) is overlap


def test_how_busy_the_device_was() -> None:
    steps = [Span("device", "step", at, at + 0.9, at) for at in range(10)]
    inner = [Span("device", "forward", at, at + 0.5, at) for at in range(10)]
    share, count = busy([*steps, *inner, Span("engine", "wait", 0.0, 100.0, 1)]) or (0.0, 0)
    assert (share, count) == (pytest.approx(9 / 9.9), 10)
    assert busy(steps[:1]) is None
