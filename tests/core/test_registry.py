"""Loading plugins: each on its own, failures kept with their reasons, offers looked up by name."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from engine.discovery import Entry, State
from engine.errors import PluginError
from engine.hooks import hookimpl
from engine.plugin import Offer, Options
from engine.registry import BrokenPlugin, Registry, UnknownComponent, noun
from engine.specs import POINTS


def offer(name: str, **more: Any) -> Offer[Any]:
    return Offer(name=name, summary="for a test", build=lambda options: name, **more)


def plugin(hook: str, *offers: object) -> object:
    """An object with one hook implementation that returns the offers."""

    def implementation() -> Iterable[object]:
        return offers

    return SimpleNamespace(**{hook: hookimpl(implementation)})


def entry(name: str, load: Callable[[], object], **more: Any) -> Entry:
    facts: dict[str, Any] = {"name": name, "distribution": "acme", "version": "1.0", "api": 1, "load": load}
    return Entry(**(facts | more))


def failing(error: BaseException) -> Callable[[], object]:
    def load() -> object:
        raise error

    return load


def reason(registry: Registry, name: str) -> str:
    (found,) = (e for e in registry.load() if e.name == name)
    assert found.state is State.BROKEN
    return found.reason


def test_offers_are_sorted_and_know_their_owner() -> None:
    registry = Registry.of({"b": plugin("kv_caches", offer("z")), "a": plugin("kv_caches", offer("m"), offer("c"))})
    assert [owned.offer.name for owned in registry.offers("kv_caches")] == ["c", "m", "z"]
    assert registry.get("kv_caches", "z").entry.name == "b"
    assert registry.offers("executors") == ()


def test_a_plugin_may_offer_at_several_points() -> None:
    both = SimpleNamespace(kv_caches=hookimpl(lambda: [offer("x")]), executors=hookimpl(lambda: [offer("x")]))
    registry = Registry.of({"both": both})
    assert registry.get("kv_caches", "x").offer is not registry.get("executors", "x").offer


def test_a_module_works_as_a_plugin() -> None:
    module = ModuleType("some_plugin")
    module.observers = hookimpl(lambda: [offer("log")])  # type: ignore[attr-defined]
    assert Registry.of({"m": module}).get("observers", "log").offer.name == "log"


def test_nothing_is_loaded_before_somebody_asks() -> None:
    calls: list[str] = []

    def load() -> object:
        calls.append("loaded")
        return plugin("kv_caches", offer("x"))

    registry = Registry([entry("a", load)])
    assert registry.entries[0].state is State.FOUND
    assert calls == []
    registry.offers("kv_caches")
    registry.offers("kv_caches")
    assert calls == ["loaded"]


@pytest.mark.parametrize("state", [State.DENIED, State.REFUSED])
def test_what_may_not_load_is_never_imported(state: State) -> None:
    registry = Registry([entry("a", failing(AssertionError("imported")), state=state, reason="because")])
    assert [(e.state, e.reason) for e in registry.load()] == [(state, "because")]


@pytest.mark.parametrize("error", [ImportError("no libfoo.so"), SystemExit("bye"), ZeroDivisionError("oops")])
def test_a_plugin_that_raises_is_broken_and_harms_nobody(error: BaseException) -> None:
    registry = Registry([entry("bad", failing(error)), entry("good", lambda: plugin("kv_caches", offer("x")))])
    assert str(error) in reason(registry, "bad")
    assert type(error).__name__ in reason(registry, "bad")
    assert registry.get("kv_caches", "x").entry.state is State.OK


def test_the_interrupt_key_still_interrupts() -> None:
    with pytest.raises(KeyboardInterrupt):
        Registry([entry("a", failing(KeyboardInterrupt()))]).load()


class Plain(Options):
    """An options model with nothing in it."""


@pytest.mark.parametrize(
    ("hook", "declared", "complaint"),
    [
        ("kv_cachs", offer("x"), "unknown hook 'kv_cachs'"),
        ("kv_caches", "text", "returned str, expected Offer"),
        ("kv_caches", offer(""), "expected a non-empty text"),
        ("kv_caches", offer("auto"), "other than 'auto'"),
        ("kv_caches", offer("x", api=2), "'x' is written for version 2 of kv_caches, this engine speaks 1"),
        ("kv_caches", offer("x", options=dict), "must be a subclass of engine.plugin.Options"),
        ("kv_caches", offer("x", options=Plain()), "must be a subclass of engine.plugin.Options"),
        ("models", offer("x"), "returned Offer, expected ModelOffer"),
        ("kv_caches", Offer(name="x", summary="", build=None), "the build of 'x' can't be called"),  # type: ignore[arg-type]
        ("kv_caches", offer("a\x1b[2J"), "offers the name 'a\\x1b[2J'"),
    ],
)
def test_a_malformed_declaration_is_broken(hook: str, declared: object, complaint: str) -> None:
    registry = Registry.of({"bad": plugin(hook, declared), "good": plugin("kv_caches", offer("y"))})
    assert complaint in reason(registry, "bad")
    assert [o.offer.name for o in registry.offers("kv_caches")] == ["y"]


def test_a_hook_that_raises_is_broken_with_the_line() -> None:
    def kv_caches() -> list[Offer[Any]]:
        raise RuntimeError("no such thing")

    said = reason(Registry.of({"bad": SimpleNamespace(kv_caches=hookimpl(kv_caches))}), "bad")
    assert said.startswith("RuntimeError: no such thing (test_registry.py:")


def test_a_hook_that_returns_nothing_is_broken() -> None:
    assert "TypeError" in reason(Registry.of({"bad": SimpleNamespace(kv_caches=hookimpl(lambda: None))}), "bad")


def test_a_hook_with_foreign_arguments_is_broken() -> None:
    bad = SimpleNamespace(kv_caches=hookimpl(lambda device: []))
    assert "device" in reason(Registry.of({"bad": bad}), "bad")


def test_a_plugin_without_hooks_is_broken() -> None:
    assert "implements no hook" in reason(Registry.of({"bad": SimpleNamespace()}), "bad")


def test_one_object_under_two_names_is_broken_once() -> None:
    shared = plugin("kv_caches", offer("x"))
    registry = Registry.of({"first": shared, "second": shared})
    assert "same object as the plugin 'first'" in reason(registry, "second")
    assert registry.get("kv_caches", "x").entry.name == "first"


def test_two_offers_of_one_name_are_an_error_that_names_both() -> None:
    registry = Registry(
        [
            entry("one", lambda: plugin("kv_caches", offer("x")), distribution="acme"),
            entry("two", lambda: plugin("kv_caches", offer("x")), distribution="rival"),
        ]
    )
    with pytest.raises(PluginError, match=r"KV cache 'x' is offered by acme 1.0 \(one\) and by rival 1.0 \(two\)"):
        registry.offers("kv_caches")


def test_an_unknown_name_lists_what_is_installed_and_the_nearest() -> None:
    registry = Registry.of({"a": plugin("attention_backends", offer("flash"), offer("naive"))})
    with pytest.raises(UnknownComponent) as caught:
        registry.get("attention_backends", "flsh")
    said = "no attention backend named 'flsh'; installed: flash, naive; did you mean 'flash'?"
    assert str(caught.value) == said


def test_an_unknown_name_mentions_the_plugin_that_may_have_offered_it() -> None:
    registry = Registry([entry("acme", failing(ImportError("no libfoo.so")))])
    with pytest.raises(UnknownComponent, match=r"'acme' of acme 1.0 is broken: ImportError: no libfoo.so"):
        registry.get("kv_caches", "tiered")
    several = Registry([entry(name, failing(ImportError("gone"))) for name in "abc"])
    with pytest.raises(UnknownComponent, match="3 plugins are unusable"):
        several.get("kv_caches", "tiered")


@pytest.mark.parametrize("name", ["kv_caches.tiered", "tiered"])
def test_naming_a_broken_plugin_is_an_error_with_owner_and_reason(name: str) -> None:
    registry = Registry([entry("kv_caches.tiered", failing(ImportError("no libfoo.so")))])
    with pytest.raises(BrokenPlugin, match=r"acme 1.0 is broken: ImportError: no libfoo.so"):
        registry.get("kv_caches", name)


def test_naming_a_denied_plugin_says_so() -> None:
    denied = entry("kv_caches.tiered", failing(AssertionError()), state=State.DENIED, reason="plugins.deny names it")
    with pytest.raises(BrokenPlugin, match=r"is denied: plugins.deny names it"):
        Registry([denied]).get("kv_caches", "tiered")


def test_every_point_has_a_noun_for_sentences() -> None:
    assert [noun(point.HOOK) for point in POINTS] == [
        "attention backend",
        "KV cache",
        "KV connector",
        "speculator",
        "model",
        "model source",
        "weight loader",
        "quantization",
        "executor",
        "scheduling policy",
        "grammar",
        "reasoning parser",
        "tool parser",
        "observer",
        "CLI command",
        "server route",
        "rate limit",
    ]


def test_registries_are_independent_values() -> None:
    one, two = Registry.of({"a": plugin("kv_caches", offer("x"))}), Registry.of({})
    assert one.offers("kv_caches")
    assert not two.offers("kv_caches")
    assert sys.modules["engine.registry"].__dict__.keys().isdisjoint({"registry", "plugins", "manager"})
