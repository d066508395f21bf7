"""What a stranger's package can do wrong: each time the distribution, the entry point and the remedy are named."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pluggy
import pytest
from pydantic import ConfigDict

from engine import discovery, hooks
from engine.capabilities import Capabilities, Flag, Layout, Needs
from engine.deadline import Overdue, within
from engine.deprecation import Ending, collected, ending
from engine.discovery import Entry, State, discover
from engine.errors import PluginError
from engine.hooks import hookimpl
from engine.plugin import Offer, Options
from engine.registry import BrokenPlugin, Registry
from engine.specs import kv_cache
from engine.specs.model import ModelOffer


def offer(name: str = "tiered", **more: Any) -> Offer[Any]:
    return Offer(name=name, summary="for a test", build=lambda options: None, **more)


def plugin(declare: Callable[[], Any], hook: str = "kv_caches") -> object:
    return SimpleNamespace(**{hook: hookimpl(declare)})


def entry(load: Callable[[], object], name: str = "acme.tiered", distribution: str = "acme") -> Entry:
    return Entry(name=name, distribution=distribution, version="1.0", api=1, load=load)


def complaint(declare: Callable[[], Any], hook: str = "kv_caches", seconds: float = 30) -> str:
    """What somebody reads who names the component of a plugin that is broken."""
    registry = Registry([entry(lambda: plugin(declare, hook))], seconds)
    with pytest.raises(BrokenPlugin) as caught:
        registry.get(hook, "tiered")
    said = str(caught.value)
    assert "the plugin 'acme.tiered' of acme 1.0 is broken: " in said
    assert said.endswith("; upgrade acme, or uninstall it")
    return said


# the vocabulary


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"devices": {"tpu"}}, "capability devices is a set, expected a frozenset"),
        (
            {"devices": frozenset({"tpu"})},
            "devices has 'tpu', which is not of the vocabulary; expected one of cpu, cuda",
        ),
        (
            {"dtypes": frozenset({"bf16"})},
            "dtypes has 'bf16', which is not of the vocabulary; expected one of bfloat16",
        ),
        (
            {"flags": frozenset({"graph_safe"})},
            "flags has 'graph_safe', which is not of the vocabulary; expected one of",
        ),
        (
            {"page_sizes": frozenset({0})},
            "page_sizes has 0, which is not of the vocabulary; expected a positive number",
        ),
        ({"head_dims": frozenset({"64"})}, "head_dims has '64', which is not of the vocabulary"),
        ({"min_compute_capability": 9.0}, "min_compute_capability is 9.0, expected a pair of numbers such as (9, 0)"),
        ({"warp_size": 32}, "not of the vocabulary of this engine, which knows devices, min_compute_capability"),
    ],
)
def test_a_capability_that_is_not_of_the_vocabulary(declared: Mapping[str, Any], said: str) -> None:
    assert said in complaint(lambda: [offer(capabilities=Capabilities(**declared))])


def test_a_word_of_a_newer_vocabulary() -> None:
    said = complaint(lambda: [offer(capabilities=Capabilities(flags=frozenset({Flag.TELEPATHIC})))])  # type: ignore[attr-defined]
    assert "TELEPATHIC; not of the vocabulary of this engine, which knows GRAPH_SAFE, " in said


def test_capabilities_of_another_type_and_requirements_of_no_extension_point() -> None:
    assert "must be an engine.plugin.Capabilities" in complaint(lambda: [offer(capabilities={"devices": "cpu"})])
    said = complaint(lambda: [offer(requires={"attention_backend": Needs()})])
    assert "requires something of 'attention_backend', no extension point; did you mean 'attention_backends'?" in said


def test_what_is_of_the_vocabulary_is_taken() -> None:
    every = Capabilities(
        devices=frozenset({"cpu", "cuda"}),
        min_compute_capability=(9, 0),
        page_sizes=frozenset({16}),
        layouts=frozenset(Layout),
        flags=frozenset(Flag),
    )
    registry = Registry([entry(lambda: plugin(lambda: [offer(capabilities=every)]))])
    assert registry.get("kv_caches", "tiered").offer.capabilities is every


# other fields of an offer


class Open(Options):
    """Takes any key, so that a typing error in the YAML would pass unseen."""

    model_config = ConfigDict(extra="allow")


@pytest.mark.parametrize(
    ("declared", "said"),
    [
        ({"rank": "high"}, "the rank of 'tiered' is 'high', expected a whole number"),
        ({"rank": True}, "the rank of 'tiered' is True, expected a whole number"),
        ({"available": "yes"}, "the available of 'tiered' is 'yes', expected a function of the device"),
        ({"wraps": None}, "the wraps of 'tiered' is None, expected True or False"),
        ({"efficiency": {"cpu": 0}}, "expected shares above 0 and up to 1 for devices among cpu, cuda"),
        ({"efficiency": {"tpu": 0.5}}, "expected shares above 0 and up to 1 for devices among cpu, cuda"),
        ({"efficiency": {"cpu": 1.5}}, "expected shares above 0 and up to 1 for devices among cpu, cuda"),
        ({"requires": {"kv_caches": 3}}, "expected extension points' hooks with an engine.plugin.Needs each"),
        ({"requires": {"kv_caches": Needs(dtype="bf16")}}, "requires of kv_caches has the dtype 'bf16', which is not"),
        (
            {"requires": {"kv_caches": Needs(flags=frozenset({"graph_safe"}))}},
            "expected a frozenset of engine.plugin.F",
        ),
        ({"options": Open}, "the options of 'tiered' must refuse unknown keys (extra='forbid'), as Options does"),
    ],
)
def test_a_field_of_another_type(declared: Mapping[str, Any], said: str) -> None:
    assert said in complaint(lambda: [offer(**declared)])


@pytest.mark.parametrize("summary", [None, "two\nlines", "\x1b[31mred"])
def test_a_summary_that_is_no_line_of_text(summary: Any) -> None:
    bad: Offer[Any] = Offer(name="tiered", summary=summary, build=lambda options: None)
    assert "expected a text of one line" in complaint(lambda: [bad])


def test_a_field_that_one_extension_point_has() -> None:
    bad = ModelOffer(name="m", summary="", build=lambda **context: None, architectures="Llama", profile=dict)  # type: ignore[arg-type]
    said = complaint(lambda: [bad], "models")
    assert "the architectures of 'm' is 'Llama', expected a frozenset of names" in said
    assert ".py:" not in said, "the line that refuses is not the plugin's"


def test_a_hook_that_returns_no_list() -> None:
    assert "kv_caches returned Offer, expected a list of offers" in complaint(offer)


def test_what_a_plugin_prints_is_no_part_of_our_output(capsys: pytest.CaptureFixture[str]) -> None:
    def declare() -> list[Offer[Any]]:
        print("hello from the hook")
        return [offer()]

    def load() -> object:
        print("hello from the import")
        return plugin(declare)

    Registry([entry(load)]).load()
    said = capsys.readouterr()
    assert (said.out, said.err) == ("", "hello from the import\nhello from the hook\n")


# names


def test_one_plugin_offers_a_name_twice() -> None:
    assert "kv_caches offers the name 'tiered' twice; rename one of the two" in complaint(lambda: [offer(), offer()])


def test_one_package_offers_a_name_through_two_entry_points() -> None:
    registry = Registry([entry(lambda: plugin(lambda: [offer()]), name) for name in ("acme.a", "acme.b")])
    with pytest.raises(PluginError) as caught:
        registry.load()
    assert str(caught.value) == (
        "the KV cache 'tiered' is offered twice by acme 1.0: by its entry points acme.a and acme.b; "
        "put one of the two into plugins.deny or upgrade the package"
    )


def test_two_packages_offer_one_name() -> None:
    pair = [entry(lambda: plugin(lambda: [offer()]), name, name) for name in ("acme", "rival")]
    with pytest.raises(PluginError) as caught:
        Registry(pair).load()
    assert str(caught.value) == (
        "the KV cache 'tiered' is offered by acme 1.0 (acme) and by rival 1.0 (rival); "
        "put one of the two into plugins.deny or uninstall it"
    )


with warnings.catch_warnings(action="ignore"):  # pydantic warns of it as well

    class Shadowing(Options):
        """A field that pydantic's models have as a method."""

        copy: bool = True  # type: ignore[assignment]


class Framed(Options):
    """A field that the frame of the YAML tree has too."""

    use: str = "x"


class Sized(Options):
    """A field that the section of KV caches has too."""

    page_size: int = 16


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (Shadowing, "a field 'copy', which shadows an attribute of pydantic's models; rename it"),
        (Framed, "a field 'use', which shadows the key 'use' of the section that names the component; rename it"),
        (Sized, "a field 'page_size', which shadows the key 'page_size' of the section"),
    ],
)
def test_an_options_model_with_a_name_that_shadows_another(options: type[Options], said: str) -> None:
    assert said in complaint(lambda: [offer(options=options)])


# time


@pytest.fixture
def hang() -> Iterator[Callable[[], Any]]:
    """Something that doesn't come back before the test is over."""
    over = threading.Event()
    yield over.wait
    over.set()


def test_a_hook_that_hangs(hang: Callable[[], Any]) -> None:
    # A bound method can't be marked as a hook.
    assert "Overdue: did not come back within 0.05 s" in complaint(lambda: hang(), seconds=0.05)


def test_an_import_that_hangs_harms_no_other_plugin(hang: Callable[[], Any]) -> None:
    registry = Registry([entry(hang, "bad"), entry(lambda: plugin(lambda: [offer()]), "good")], seconds=0.05)
    assert [(e.name, e.state) for e in registry.load()] == [("bad", State.BROKEN), ("good", State.OK)]
    assert registry.get("kv_caches", "tiered").entry.name == "good"


def test_within_hands_on_what_is_returned_and_raised(hang: Callable[[], Any]) -> None:
    assert within(10, lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        within(10, lambda: 1 // 0)
    with pytest.raises(SystemExit):
        within(10, lambda: exit(3))
    with pytest.raises(Overdue):
        within(0.01, hang)


# versions and endings

OLD = Ending("hook API v1", ends="0.9", instead="write it for v2")


def test_a_number_of_the_hook_api_out_of_range(monkeypatch: pytest.MonkeyPatch) -> None:
    points = [
        SimpleNamespace(name=f"acme.{hooks}", dist=distribution(hooks), load=None) for hooks in ("v9", "v0", None)
    ]
    monkeypatch.setattr(discovery.metadata, "entry_points", lambda group: points)
    reasons = {e.name: e.reason for e in discover()}
    wanted = "this engine speaks v1, stated by hooks = \"v1\" in the entry-point group 'engine.api'"
    assert reasons == {
        "acme.v9": f"acme-v9 is written for hook API v9; {wanted}; upgrade the engine, or uninstall acme-v9",
        "acme.v0": f"acme-v0 is written for hook API v0; {wanted}; upgrade acme-v0, or uninstall acme-v0",
        "acme.None": f"acme-None does not say which hook API it is written for; {wanted}; "
        "upgrade acme-None, or uninstall acme-None",
    }


def distribution(hooks: str | None) -> object:
    """What metadata tell of a package that states this hook API."""
    lines = [SimpleNamespace(value=hooks)] if hooks else []
    points = SimpleNamespace(select=lambda group, name: lines)
    return SimpleNamespace(name=f"acme-{hooks}", version="1.0", entry_points=points)


def test_an_older_hook_api_is_accepted_with_a_warning_until_it_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(discovery, "HOOK_API", 2)
    monkeypatch.setattr(discovery, "ENDING", {1: OLD})
    points = [SimpleNamespace(name="old", dist=distribution("v1"), load=lambda: plugin(lambda: [offer()]))]
    monkeypatch.setattr(discovery.metadata, "entry_points", lambda group: points)
    (found,) = Registry.discover().load()
    assert found.state is State.OK
    assert found.warnings == (
        "acme-v1 1.0 (entry point old) uses hook API v1, which ends with engine 0.9; write it for v2",
    )


def test_an_older_number_of_an_extension_point_is_accepted_with_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_cache, "ENDING", {0: Ending("kv_caches 0", ends="0.9", instead="add trim()")}, raising=False)
    (found,) = Registry([entry(lambda: plugin(lambda: [offer(api=0)]))]).load()
    assert found.state is State.OK
    assert found.warnings == (
        "acme 1.0 (entry point acme.tiered) uses kv_caches 0, which ends with engine 0.9; add trim()",
    )


def test_a_deprecated_thing_that_a_plugin_uses_is_told_under_its_name_once() -> None:
    def old_helper() -> None:
        ending("Offer.speed", ends="0.9", instead="use efficiency")

    def declare() -> list[Offer[Any]]:
        old_helper()
        old_helper()
        return [offer()]

    registry = Registry([entry(lambda: plugin(declare)), entry(lambda: plugin(lambda: [offer("y")]), "fine")])
    assert {e.name: e.warnings for e in registry.load()} == {
        "acme.tiered": (
            "acme 1.0 (entry point acme.tiered) uses Offer.speed, which ends with engine 0.9; use efficiency",
        ),
        "fine": (),
    }


def test_a_deprecated_hook_is_told_to_who_implements_it() -> None:
    class Spec:
        @hooks.hookspec(warn_on_impl=OLD)
        def old_hook(self) -> None: ...

    manager = pluggy.PluginManager(hooks.PROJECT)
    manager.add_hookspecs(Spec)
    with collected() as endings:
        manager.register(plugin(lambda: None, "old_hook"))
    assert [str(e) for e in endings] == [str(OLD)]


def test_in_the_plugins_own_tests_it_is_an_ordinary_warning_at_its_line() -> None:
    def old_helper() -> None:
        ending("Offer.speed", ends="0.9", instead="use efficiency")

    with pytest.warns(DeprecationWarning, match=r"Offer.speed ends with engine 0.9; use efficiency") as caught:
        old_helper()
    assert caught[0].filename == __file__


def test_other_warnings_of_a_plugin_go_their_usual_way() -> None:
    with pytest.warns(UserWarning, match="unrelated"), collected() as endings:
        warnings.warn("unrelated", stacklevel=1)
    assert endings == []
