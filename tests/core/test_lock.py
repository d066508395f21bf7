"""Locks of made-up distributions: what is hashed, what differs, and what each refusal says."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib import metadata
from pathlib import Path

import pytest

from engine.content_hash import content_hash
from engine.discovery import discover
from engine.errors import PluginError
from engine.lock import Lock, Locked, differences, dump, load, take

Install = Callable[..., Path]


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Install:
    """Lays out a distribution as pip does, on a folder of `sys.path`; its plugin ends the process when imported."""
    site = tmp_path / "site"
    site.mkdir()
    monkeypatch.syspath_prepend(str(site))

    def make(name: str, version: str = "1.0", code: str = "raise SystemExit('my code must not run')\n") -> Path:
        info = site / f"{name}-{version}.dist-info"
        for path, text in {
            site / name / "__init__.py": code,
            site / name / "deeper" / "part.py": "x = 1\n",
            info / "METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n",
            info / "entry_points.txt": f"[engine]\n{name} = {name}.deeper.part\n[engine.api]\nhooks = v1\n",
            info / "INSTALLER": "pip\n",
        }.items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        recorded = [p for p in site.rglob("*") if p.is_file() and (name in p.parts[-3:] or info in p.parents)]
        lines = [f"{path.relative_to(site)},," for path in recorded] + [f"../../bin/{name},,"]
        (info / "RECORD").write_text("\n".join([*lines, f"{name}/__pycache__/__init__.cpython-311.pyc,,"]) + "\n")
        return site

    return make


def now() -> Lock:
    """Without the engine's own distribution, which grows."""
    return tuple(each for each in take(discover()) if each.name != "engine-llm")


def test_a_lock_survives_its_file_and_imports_nothing(install: Install, tmp_path: Path) -> None:
    install("alpha")
    install("beta", "2.1")
    lock = take(discover())
    assert [(each.name, each.version, each.plugins) for each in lock[:2]] == [
        ("alpha", "1.0", ("alpha",)),
        ("beta", "2.1", ("beta",)),
    ]
    assert "kv_caches.radix" in lock[-1].plugins
    (tmp_path / "engine.lock").write_text(dump(lock))
    assert load(tmp_path / "engine.lock") == lock
    assert differences(lock, take(discover())) == []
    assert "alpha" not in sys.modules


@pytest.mark.parametrize(
    ("file", "text"), [("alpha/deeper/part.py", "x = 2\n"), ("alpha-1.0.dist-info/entry_points.txt", "[engine]\n")]
)
def test_another_byte_is_another_hash(install: Install, file: str, text: str) -> None:
    site = install("alpha")
    before = content_hash(metadata.distribution("alpha"))
    (site / file).write_text(text)
    assert content_hash(metadata.distribution("alpha")) != before


def test_a_file_that_is_gone_is_another_hash(install: Install) -> None:
    site = install("alpha")
    before = content_hash(metadata.distribution("alpha"))
    (site / "alpha" / "deeper" / "part.py").unlink()
    assert content_hash(metadata.distribution("alpha")) != before


@pytest.mark.parametrize("file", ["alpha/deeper/part/__init__.py", "alpha/deeper/part.abi3.so", "alpha/new.py"])
def test_a_module_that_was_added_later_is_another_hash(install: Install, file: str) -> None:
    site = install("alpha")
    before = content_hash(metadata.distribution("alpha"))
    (site / file).parent.mkdir(exist_ok=True)
    (site / file).write_text("x = 2\n")  # a package or an extension is imported before the module of its name
    assert content_hash(metadata.distribution("alpha")) != before


def test_what_a_plugin_writes_beside_its_modules_does_not_count(install: Install) -> None:
    site = install("alpha")
    before = content_hash(metadata.distribution("alpha"))
    (site / "alpha" / "tuned.json").write_text("{}")
    assert content_hash(metadata.distribution("alpha")) == before


def test_a_package_of_the_same_name_earlier_on_the_path_is_another_hash(
    install: Install, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    install("alpha")
    before = content_hash(metadata.distribution("alpha"))
    (tmp_path / "other" / "alpha").mkdir(parents=True)
    (tmp_path / "other" / "alpha" / "__init__.py").write_text("x = 2\n")
    monkeypatch.syspath_prepend(str(tmp_path / "other"))
    assert content_hash(metadata.distribution("alpha")) != before


@pytest.mark.parametrize("file", ["alpha/__pycache__/__init__.cpython-311.pyc", "alpha-1.0.dist-info/INSTALLER"])
def test_byte_code_and_notes_of_the_installer_do_not_count(install: Install, file: str) -> None:
    site = install("alpha")
    before = content_hash(metadata.distribution("alpha"))
    (site / file).parent.mkdir(exist_ok=True)
    (site / file).write_text("something else")
    assert content_hash(metadata.distribution("alpha")) == before


def test_an_editable_install_is_hashed_where_its_packages_lie(install: Install) -> None:
    site = install("alpha")
    info = site / "alpha-1.0.dist-info"
    (info / "direct_url.json").write_text(json.dumps({"url": site.as_uri(), "dir_info": {"editable": True}}))
    (info / "RECORD").write_text("__editable__.alpha.pth,,\n")
    before = content_hash(metadata.distribution("alpha"))
    (site / "alpha" / "__pycache__").mkdir()
    (site / "alpha" / "__pycache__" / "x.pyc").write_bytes(b"1")
    assert content_hash(metadata.distribution("alpha")) == before
    (site / "alpha" / "data.json").write_text("{}")
    assert content_hash(metadata.distribution("alpha")) != before
    (site / "alpha" / "__init__.py").unlink()  # a namespace now, of which only the module itself is the plugin's
    namespaced = content_hash(metadata.distribution("alpha"))
    (site / "alpha" / "data.json").write_text("[]")
    assert content_hash(metadata.distribution("alpha")) == namespaced
    (site / "alpha" / "deeper" / "part.py").write_text("x = 3\n")
    assert content_hash(metadata.distribution("alpha")) != namespaced
    assert "alpha" not in sys.modules


def test_the_engine_itself_is_hashed_wherever_it_lies() -> None:
    distribution = metadata.distribution("engine-llm")
    assert content_hash(distribution) == content_hash(distribution) != content_hash(metadata.distribution("pluggy"))


def test_what_the_configuration_denies_is_not_locked(install: Install) -> None:
    install("alpha")
    assert [each.name for each in take(discover(deny=["alpha"]))] == ["engine-llm"]


WANTED = (Locked("alpha", "1.0", "sha256:" + "a" * 64, ("alpha", "second")),)


@pytest.mark.parametrize(
    ("found", "said"),
    [
        (
            (),
            "alpha 1.0 is locked, but none of its plugins (alpha, second) would load; install it "
            "(pip install alpha==1.0), take it out of plugins.deny, or write the lock anew with `engine plugins lock`",
        ),
        (
            (replace(WANTED[0], version="1.1"),),
            "alpha is installed in version 1.1, locked is 1.0; pip install alpha==1.0, or write the lock anew with "
            "`engine plugins lock`",
        ),
        (
            (replace(WANTED[0], hash="sha256:" + "b" * 64),),
            "alpha 1.0 has other content (sha256:bbbbbbbbbbbb…) than was locked (sha256:aaaaaaaaaaaa…); "
            "pip install --force-reinstall alpha==1.0, or write the lock anew with `engine plugins lock`",
        ),
        (
            (*WANTED, Locked("beta", "2.1", "sha256:" + "c" * 64, ("beta", "gamma"))),
            "beta 2.1 brings what is not locked: beta, gamma; put that into plugins.deny, uninstall beta, or write the "
            "lock anew with `engine plugins lock`",
        ),
        (
            (replace(WANTED[0], plugins=("alpha", "second", "third")),),
            "alpha 1.0 brings what is not locked: third; put that into plugins.deny, uninstall alpha, or write the "
            "lock anew with `engine plugins lock`",
        ),
        ((replace(WANTED[0], plugins=("alpha",)),), None),
    ],
    ids=["missing", "other version", "other content", "more", "more of the same", "less of the same"],
)
def test_each_difference_is_a_sentence_with_the_way_out(found: Lock, said: str | None) -> None:
    assert differences(WANTED, found) == ([said] if said else [])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("model: x\n", "is no lock: Expecting value"),
        ("[]", 'is no lock: it lacks "lock": 1'),
        ('{"lock": 2, "distributions": []}', 'is no lock: it lacks "lock": 1'),
        ('{"lock": 1}', "is no lock: distributions"),
        ('{"lock": 1, "distributions": [{"name": "a"}]}', "is no lock: distributions[0, 'version']: Field required"),
    ],
)
def test_a_file_that_is_no_lock_is_named(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "some.file"
    path.write_text(text)
    with pytest.raises(PluginError, match=r"some\.file") as failure:
        load(path)
    assert said in str(failure.value)
    assert "engine plugins lock" in str(failure.value)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(PluginError, match=r"none.lock can't be read: No such file"):
        load(tmp_path / "none.lock")
