"""Finding a model's files by the scheme of `model.source`, up to composing the packaged model without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from engine.compose import resolve_source
from engine.config.load import load_config
from engine.errors import CompositionError, EngineError, ResourceError
from engine.hooks import hookimpl
from engine.plugin import Offer
from engine.registry import Registry
from engine.specs.model_source import ModelFiles, ModelSource, Progress


class Shelf(ModelSource):
    """Finds what lies on it."""

    def resolve(self, rest: str, progress: Progress) -> ModelFiles:
        progress(1.0, "found")
        if rest != "here":
            raise FileNotFoundError(f"nothing called {rest} lies on the shelf; put it there")
        return ModelFiles(path=Path("/shelf/here"), name="here")


@pytest.fixture
def plugins() -> Registry:
    """A registry with the shelf as its only source."""
    offer = Offer(name="shelf", summary="what lies on the shelf", build=lambda options: Shelf())
    return Registry.of({"shelf": SimpleNamespace(model_sources=hookimpl(lambda: [offer]))})


def test_a_source_is_resolved_by_its_scheme(plugins: Registry) -> None:
    seen: list[tuple[float, str]] = []
    loaded = load_config(None, ["model.source=shelf:here"])
    files = resolve_source(loaded.config, plugins, lambda share, words: seen.append((share, words)))
    assert (files.name, seen) == ("here", [(1.0, "found")])


@pytest.mark.parametrize(
    ("source", "error", "said"),
    [
        (
            "models/small",
            CompositionError,
            "expected SCHEME:REST with one of the schemes shelf:; a folder or file is path:",
        ),
        ("shelf:", CompositionError, "expected SCHEME:REST"),
        ("shlf:x", CompositionError, "no model source named 'shlf'; installed: shelf; did you mean 'shelf'?"),
        ("shelf:gone", ResourceError, "nothing called gone lies on the shelf; put it there"),
    ],
)
def test_a_bad_source_is_one_sentence(plugins: Registry, source: str, error: type[EngineError], said: str) -> None:
    loaded = load_config(None, [f"model.source='{source}'"])
    with pytest.raises(error) as caught:
        resolve_source(loaded.config, plugins, lambda share, words: None, loaded.origins)
    assert str(caught.value).startswith(f"--set model.source: model.source is {source!r}")
    assert said in str(caught.value)


def test_composing_the_packaged_model_imports_no_torch() -> None:
    code = """
import sys
from engine.compose import compose, resolve_source
from engine.config.load import load_config
from engine.device import detect
from engine.registry import Registry
config, registry = load_config(None).config, Registry.discover()
files = resolve_source(config, registry, lambda share, words: None)
found = compose(config, registry, detect("cpu"), files.path)
assert found.profile.architecture == "LlamaForCausalLM", found.profile
assert found.choices["loader"].name == "gguf"
sys.exit("torch" in sys.modules or "transformers" in sys.modules)
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
