"""Reading entry points from metadata: nothing is imported, clashes and foreign API numbers are refused."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from engine.discovery import State, discover, nearest
from engine.errors import PluginError

Install = Callable[..., None]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Writes the metadata of a distribution, as pip would, into a folder on the path."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def write(distribution: str, entries: dict[str, str], hooks: str | None = "v1", version: str = "1.0") -> None:
        folder = tmp_path / f"{distribution.replace('-', '_')}-{version}.dist-info"
        folder.mkdir()
        (folder / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {distribution}\nVersion: {version}\n")
        lines = ["[engine]", *(f"{name} = {target}" for name, target in entries.items())]
        lines += ["[engine.api]", f"hooks = {hooks}"] if hooks else []
        (folder / "entry_points.txt").write_text("\n".join(lines) + "\n")

    return write


def test_an_installed_entry_point_is_found_and_not_imported(install: Install, tmp_path: Path) -> None:
    (tmp_path / "acme_explosive.py").write_text("raise SystemExit('imported')")
    install("acme-attn", {"acme": "acme_explosive"}, version="2.5")
    entry = next(e for e in discover() if e.name == "acme")
    assert (entry.distribution, entry.version, entry.api, entry.state) == ("acme-attn", "2.5", 1, State.FOUND)
    assert entry.owner == "acme-attn 2.5"
    assert "acme_explosive" not in sys.modules


def test_the_built_ins_come_through_the_same_door() -> None:
    names = {e.name for e in discover() if e.distribution == "engine-llm"}
    assert {"attention.reference", "kv_caches.radix", "speculators.ngram"} <= names


def test_entries_are_sorted_by_name(install: Install) -> None:
    install("zzz", {"aaa": "m"})
    install("aaa", {"zzz": "m"})
    names = [e.name for e in discover()]
    assert names == sorted(names)
    assert {names[0], names[-1]} == {"aaa", "zzz"}


@pytest.mark.parametrize(
    ("hooks", "said"),
    [
        (None, "acme does not say which hook API it is written for"),
        ("v2", "acme is written for hook API v2"),
        ("1", "acme is written for hook API 1"),
        ("newest", "acme is written for hook API newest"),
    ],
)
def test_a_foreign_hook_api_is_refused_with_a_sentence(install: Install, hooks: str | None, said: str) -> None:
    install("acme", {"acme": "never_imported"}, hooks=hooks)
    entry = next(e for e in discover() if e.name == "acme")
    assert entry.state is State.REFUSED
    assert entry.reason.startswith(said)
    assert "this engine speaks v1" in entry.reason


def test_two_owners_of_a_name_are_an_error_that_names_both(install: Install) -> None:
    install("acme", {"shared": "m"})
    install("rival", {"shared": "m"}, version="3.0")
    with pytest.raises(PluginError, match=r"'shared' is claimed by (acme 1.0|rival 3.0) and by (acme 1.0|rival 3.0)"):
        discover()
    assert all(e.state is State.DENIED for e in discover(deny=["shared"]) if e.name == "shared")


def test_a_clash_with_a_built_in_is_no_exception(install: Install) -> None:
    install("acme", {"attention.reference": "m"})
    with pytest.raises(PluginError, match=r"claimed by .*(engine-llm|acme)"):
        discover()


def test_deny_keeps_a_plugin_out(install: Install) -> None:
    install("acme", {"acme": "m"})
    states = {e.name: e.state for e in discover(deny=["acme"])}
    assert states["acme"] is State.DENIED
    assert states["kv_caches.paged"] is State.FOUND


def test_allow_keeps_everything_else_out(install: Install) -> None:
    install("acme", {"acme": "m"})
    entries = discover(allow=["acme"])
    assert [e.name for e in entries if e.state is State.FOUND] == ["acme"]
    assert all(e.reason == "plugins.allow does not name it" for e in entries if e.state is State.DENIED)


@pytest.mark.parametrize("filters", [{"allow": ["kv_caches.pagd"]}, {"deny": ["kv_caches.pagd"]}])
def test_a_name_that_is_not_installed_is_an_error_with_the_nearest(filters: dict[str, list[str]]) -> None:
    with pytest.raises(PluginError, match=r"'kv_caches.pagd', but .* did you mean 'kv_caches.paged'\?"):
        discover(**filters)


def test_metadata_without_a_name_or_version_are_survived(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(tmp_path))
    folder = tmp_path / "odd-1.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.1\n")
    (folder / "entry_points.txt").write_text("[engine]\nodd = m\n")
    entry = next(e for e in discover() if e.name == "odd")
    assert entry.state is State.REFUSED
    assert entry.owner == "an unnamed distribution (no version)"


def test_nearest_says_nothing_when_nothing_is_near() -> None:
    assert nearest("zzzz", ["paged", "radix"]) == ""
    assert nearest("padix", ["paged", "radix"]) == "; did you mean 'radix'?"
