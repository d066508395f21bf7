"""What speculation brings, as Prometheus metrics: counters by place in the draft and by context, and the controller."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Final

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily
from prometheus_client.metrics_core import Metric

_STATES: Final = ("off", "probing", "on")
_PREFIX: Final = "engine_spec_decode_"


def speculation_metrics(model: str, drafts: Mapping[str, Any]) -> Iterator[Metric]:
    """The families; none for an engine without a speculator.

    Args:
        drafts: what the core's `stats` say under this name.
    """
    if not drafts:
        return
    steps, drafted, accepted = drafts["steps"], drafts["drafted"], drafts["accepted"]
    yield _counter("num_drafts", "Drafts verified.", model, steps)
    yield _counter("num_draft_tokens", "Draft tokens verified.", model, drafted)
    yield _counter("num_accepted_tokens", "Draft tokens kept.", model, accepted)
    yield _counter("num_wasted_tokens", "Draft tokens verified and thrown away.", model, drafted - accepted)
    yield _counter("faults", "Proposals that raised or were malformed.", model, drafts["faults"])
    if steps:
        length = (accepted + steps) / steps
        yield _gauge("acceptance_length", "Tokens that a verified draft brings, since the start.", model, length)
    yield _by_place(model, drafts["accepted_at"])
    yield from _by_context(model, drafts["contexts"])
    if controller := drafts["controller"]:
        yield from _controller(model, controller)


def _by_place(model: str, accepted_at: Sequence[int]) -> Metric:
    text = "Draft tokens kept, by place in the draft."
    places = CounterMetricFamily(f"{_PREFIX}num_accepted_tokens_per_pos", text, labels=["model_name", "position"])
    for place, count in enumerate(accepted_at):
        places.add_metric([model, str(place)], count)
    return places


def _by_context(model: str, contexts: Sequence[Mapping[str, Any]]) -> Iterator[Metric]:
    for key, name, text in (
        ("steps", "context_drafts", "Drafts verified, by tokens of context."),
        ("drafted", "context_draft_tokens", "Draft tokens verified, by tokens of context."),
        ("accepted", "context_accepted_tokens", "Draft tokens kept, by tokens of context."),
    ):
        family = CounterMetricFamily(_PREFIX + name, text, labels=["model_name", "context"])
        for counters in contexts:
            family.add_metric([model, counters["context"]], counters[key])
        yield family


def _controller(model: str, controller: Mapping[str, Any]) -> Iterator[Metric]:
    state = GaugeMetricFamily(f"{_PREFIX}state", "What the controller is doing: 1.", labels=["model_name", "state"])
    for name in _STATES:
        state.add_metric([model, name], float(controller["state"] == name))
    yield state
    yield _gauge("gain", "Tokens per second that are expected, against plain steps.", model, controller["gain"])
    yield _gauge("alarm", "1 while drafts don't pay.", model, float(controller["alarm"]))
    yield _counter("alarms", "How often drafts ceased to pay.", model, controller["alarms"])
    yield _gauge("balance", "What may be lost to drafts right now, in plain steps.", model, controller["balance"])
    if controller["acceptance"] is not None:
        text = "Share of draft tokens kept lately."
        yield _gauge("acceptance_rate", text, model, controller["acceptance"])
        text = "Share of draft tokens that must be kept for drafts to pay."
        yield _gauge("break_even_rate", text, model, controller["break_even"])


def _counter(name: str, text: str, model: str, value: float) -> Metric:
    family = CounterMetricFamily(_PREFIX + name, text, labels=["model_name"])
    family.add_metric([model], value)
    return family


def _gauge(name: str, text: str, model: str, value: float) -> Metric:
    family = GaugeMetricFamily(_PREFIX + name, text, labels=["model_name"])
    family.add_metric([model], value)
    return family


__all__ = ["speculation_metrics"]
