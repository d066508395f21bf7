"""Components that wrap another of their kind: found, judged, built and told like any part."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from engine.compose import compose
from engine.composition import Composition
from engine.config.components import check
from engine.config.load import load_config
from engine.device import DeviceProfile
from engine.errors import CompositionError, ConfigError
from engine.hooks import hookimpl
from engine.plugin import Capabilities, KVKind, Mask, Offer, Options, WrapperOptions
from engine.registry import Registry
from engine.specs.attention import AttentionBackend, KVLayout

CPU = DeviceProfile(kind="cpu", name="a CPU", memory_bytes=2**34, cores=2)


class Loud(WrapperOptions):
    """Options of the wrapper."""

    volume: int = 1


class Plain(Options):
    """Options of what is wrapped."""

    depth: int = 1


class Built(AttentionBackend):
    """Remembers how it was made; nobody attends here."""

    def __init__(self, *words: object) -> None:
        self.words = words

    def kv_layout(self) -> KVLayout:
        raise AssertionError

    def plan(self, batch: object) -> None:
        raise AssertionError

    def forward(self, *arguments: object) -> Any:
        raise AssertionError


def around(options: Loud, *, inner: Built, **context: object) -> Built:
    return Built("loud", options.volume, inner.words)


def plain(options: Plain, **context: object) -> Built:
    return Built("plain", options.depth, *sorted(context))


ABLE = Capabilities(kv_kinds=frozenset({KVKind.GQA}), masks=frozenset({Mask.CAUSAL}))
WRAPPER: Offer[Any] = Offer(name="loud", summary="", build=around, options=Loud, wraps=True, rank=99)
OFFERS = [
    WRAPPER,
    Offer(name="plain", summary="", build=plain, options=Plain, capabilities=ABLE),
    Offer(name="blind", summary="", build=plain, options=Plain, rank=-1),
]


def registry() -> Registry:
    """What is installed, with three attention backends of ours instead."""
    plugin = SimpleNamespace(attention_backends=hookimpl(lambda: OFFERS))
    found = Registry.discover(deny=[e.name for e in Registry.discover().entries if e.name.startswith("attention.")])
    return Registry([*found.entries, *Registry.of({"ours": plugin}, distribution="acme").entries])


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A model of which only the config is there."""
    fields = {"hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1, "num_attention_heads": 1}
    config = {"architectures": ["LlamaForCausalLM"], "vocab_size": 9, **fields}
    (tmp_path / "config.json").write_text(json.dumps(config))
    return tmp_path


def composed(model: Path, *overrides: str) -> Composition:
    loaded = load_config(None, ["model.loader=dummy", *overrides])
    return compose(loaded.config, registry(), CPU, model, loaded.origins)


def test_auto_takes_no_wrapper(model: Path) -> None:
    choice = composed(model).choices["attention"]
    assert (choice.name, choice.inner) == ("plain", None)
    (refusal,) = [r for r in choice.refused if r.name == "loud"]
    assert refusal.reasons == ("wraps another component, so it is taken only where it is named",)


def test_a_wrapper_stands_around_the_best_that_fits(model: Path) -> None:
    composition = composed(model, "attention=loud")
    choice = composition.choices["attention"]
    assert choice.inner is not None
    assert (choice.name, choice.inner.name, choice.core.name) == ("loud", "plain", "plain")
    assert [part for part, _ in composition.parts()][2:5] == ["attention", "attention.inner", "kv_cache"]
    assert choice.build(page=3).words == ("loud", 1, ("plain", 1, "page"))


def test_what_is_wrapped_can_be_named_and_wrap_again(model: Path) -> None:
    inner = "{use: loud, options: {volume: 3, inner: {use: plain, options: {depth: 4}}}}"
    choice = composed(model, "attention=loud", f"attention.options.inner={inner}").choices["attention"]
    assert choice.build().words == ("loud", 1, ("loud", 3, ("plain", 4)))


def test_what_is_wrapped_must_fit(model: Path) -> None:
    with pytest.raises(CompositionError, match=r"attention.options.inner: the attention backend 'blind' can't be used"):
        composed(model, "attention=loud", "attention.options.inner.use=blind")


@pytest.mark.parametrize(
    ("inner", "words"),
    [
        ("{use: plane}", "attention.options.inner: no attention backend named 'plane'.*did you mean 'plain'"),
        ("{use: plain, options: {dept: 4}}", "attention.options.inner.options.dept"),
        ("{options: {depth: 4}}", "attention.options.inner.options is given while"),
    ],
)
def test_mistakes_inside_are_found_with_their_place(model: Path, inner: str, words: str) -> None:
    loaded = load_config(None, ["attention=loud", f"attention.options.inner={inner}"])
    with pytest.raises(ConfigError, match=words):
        check(loaded, registry())


def test_a_wrapper_without_a_place_for_the_inner_one_is_refused() -> None:
    bad: Offer[Any] = Offer(name="loud", summary="", build=around, wraps=True)
    plugin = SimpleNamespace(attention_backends=hookimpl(lambda: [bad]))
    (entry,) = Registry.of({"ours": plugin}, distribution="acme").load()
    assert "'loud' wraps, so its options must be a subclass of engine.plugin.WrapperOptions" in entry.reason
