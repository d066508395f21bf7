"""Parts that must fit one another: what is named steers what `auto` takes, and whoever is in the way is named."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from engine import selection
from engine.capabilities import Capabilities, Flag, Needs
from engine.config.components import named
from engine.config.load import load_config
from engine.device import DeviceProfile
from engine.errors import CompositionError
from engine.fit import Placed, clashes
from engine.hooks import hookimpl
from engine.plugin import Offer, Options
from engine.registry import Registry
from engine.selection import Choice, Selector

CPU = DeviceProfile(kind="cpu", name="a CPU", memory_bytes=2**34, cores=2)
REUSE = Needs(flags=frozenset({Flag.PREFIX_REUSE}))
REUSING = Capabilities(flags=REUSE.flags)


def part(name: str, **more: Any) -> Offer[Any]:
    return Offer(name=name, summary="for a test", build=lambda options, **context: None, **more)


def select(points: dict[str, Sequence[Offer[Any]]], *overrides: str) -> dict[str, Choice[Any]]:
    """Choose one component of each point, in the order of the configuration."""
    plugins = {hook: SimpleNamespace(**{hook: hookimpl(lambda o=offers: o)}) for hook, offers in points.items()}
    loaded = load_config(None, overrides)
    components = [component for component in named(loaded.config) if component.point in points]
    selector = Selector(registry=Registry.of(plugins, distribution="acme"), device=CPU, origins=loaded.origins)
    selector.settle(components)
    return {c.point: selector.choose(c, Needs(device="cpu")) for c in components}


def refused(points: dict[str, Sequence[Offer[Any]]], *overrides: str) -> str:
    with pytest.raises(CompositionError) as caught:
        select(points, *overrides)
    return str(caught.value)


POINTS = {
    "kv_caches": [part("plain", rank=9), part("reusing", capabilities=REUSING)],
    "scheduling_policies": [part("fcfs"), part("by_prefix", rank=9, requires={"kv_caches": REUSE})],
}


def test_a_named_part_steers_what_auto_takes_before_it() -> None:
    cache = select(POINTS, "kv_cache=auto", "scheduler=by_prefix")["kv_caches"]
    assert cache.name == "reusing"
    assert [(r.name, r.reasons) for r in cache.refused] == [
        ("plain", ("lacks prefix_reuse, which the scheduling policy 'by_prefix' requires",))
    ]


def test_a_named_part_steers_what_auto_takes_after_it() -> None:
    policy = select(POINTS, "kv_cache=plain", "scheduler=auto")["scheduling_policies"]
    assert policy.name == "fcfs"
    assert policy.refused[0].reasons == ("the KV cache 'plain' lacks prefix_reuse",)


def test_of_two_named_parts_that_clash_the_first_is_refused() -> None:
    assert refused(POINTS, "kv_cache=plain", "scheduler=by_prefix").endswith(
        "the KV cache 'plain' can't be used here: lacks prefix_reuse, which the scheduling policy 'by_prefix' requires"
    )


def test_a_named_part_that_fits_nothing_is_refused_under_its_own_name() -> None:
    points = POINTS | {"kv_caches": [part("plain")]}
    assert refused(points, "kv_cache=auto", "scheduler=by_prefix").endswith(
        "the scheduling policy 'by_prefix' can't be used here: the KV cache 'plain' lacks prefix_reuse"
    )


def test_an_early_choice_of_auto_that_leaves_nothing_is_told() -> None:
    halves = Capabilities(dtypes=frozenset({"float16"}))
    wholes = Capabilities(dtypes=frozenset({"float32", "bfloat16"}))
    points = {"kv_caches": [part("half", capabilities=halves)], "executors": [part("here", capabilities=wholes)]}
    assert refused(points, "kv_cache=auto") == (
        "executor: no installed executor fits: here: dtype bfloat16, float32 against float16 of the KV cache 'half'"
    )


def test_a_named_part_leaves_word_of_what_else_there_is() -> None:
    cuda = Capabilities(devices=frozenset({"cuda"}))
    choice = select({"kv_caches": [part("radix"), part("paged"), part("far", capabilities=cuda)]})["kv_caches"]
    assert (choice.name, choice.plugin, choice.distribution) == ("radix", "kv_caches", "acme 0")
    assert [(r.name, r.fits, r.reasons) for r in choice.refused] == [
        ("far", False, ("device cpu is not among cuda",)),
        ("paged", True, ("fits too, but radix is the default",)),
    ]


def test_equal_ranks_are_decided_the_same_way_every_time() -> None:
    pair = [part("b"), part("a")]
    for offers in (pair, pair[::-1]):
        assert select({"executors": offers})["executors"].name == "a"


def test_a_candidate_that_raises_when_asked_is_refused_not_fatal() -> None:
    def explode(device: DeviceProfile) -> str | None:
        raise RuntimeError("driver hiccup")

    choice = select({"executors": [part("odd", rank=9, available=explode), part("plain")]})["executors"]
    assert choice.name == "plain"
    assert choice.refused[0].reasons == ("asking it failed with RuntimeError: driver hiccup",)


class Sized(Options):
    """Options, one of them required."""

    size: int


def test_a_candidate_that_never_answers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    over = threading.Event()
    monkeypatch.setattr(selection, "ANSWER_SECONDS", 0.05)
    choice = select({"executors": [part("odd", rank=9, available=lambda device: over.wait()), part("plain")]})
    over.set()
    assert choice["executors"].name == "plain"
    assert "Overdue: did not come back within 0.05 s" in choice["executors"].refused[0].reasons[0]


def test_a_candidate_that_answers_nonsense_is_refused() -> None:
    choice = select({"executors": [part("odd", rank=9, available=lambda device: True), part("plain")]})["executors"]
    assert choice.refused[0].reasons == ("asking it gave True, expected None or the reason against it",)


def test_auto_passes_over_a_component_with_required_options() -> None:
    choice = select({"executors": [part("remote", rank=9, options=Sized), part("here")]})["executors"]
    assert choice.name == "here"
    assert choice.refused[0].reasons == ("needs options that have no default: size",)


@pytest.mark.parametrize(
    ("one", "other", "said"),
    [
        ({}, {}, []),
        ({"page_sizes": frozenset({16})}, {}, []),
        ({"page_sizes": frozenset({16, 32})}, {"page_sizes": frozenset({32, 64})}, []),
        (
            {"page_sizes": frozenset({64})},
            {"page_sizes": frozenset(range(16, 49, 16)), "head_dims": frozenset({64})},
            ["page size 64 against 16, 32, 48 of the executor 'b'"],
        ),
        (
            {"page_sizes": frozenset(range(16, 1025, 16))},
            {"page_sizes": frozenset({8})},
            ["page size 16, 32, …, 1024 against 8 of the executor 'b'"],
        ),
        (
            {"devices": frozenset({"cuda"}), "dtypes": frozenset({"float16"})},
            {"devices": frozenset({"cpu"}), "dtypes": frozenset({"float32"})},
            ["device cuda against cpu of the executor 'b'", "dtype float16 against float32 of the executor 'b'"],
        ),
    ],
)
def test_limits_clash_when_they_have_nothing_in_common(
    one: dict[str, Any], other: dict[str, Any], said: list[str]
) -> None:
    a = Placed("kv_caches", part("a", capabilities=Capabilities(**one)))
    b = Placed("executors", part("b", capabilities=Capabilities(**other)))
    assert clashes(a, b) == said
    assert len(clashes(b, a)) == len(said)
