"""The tokenizer beside an engine core process, read by the loader that the core chooses too. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from engine.config.model import EngineConfig
from engine.errors import ResourceError
from engine.registry import Registry
from engine.specs.weight_loader import WeightLoader

if TYPE_CHECKING:
    from engine.tokenizer import Tokenizer


def load_tokenizer(config: EngineConfig, registry: Registry, path: Path) -> Tokenizer:
    """The tokenizer of the model at `path`.

    Raises:
        EngineError: no loader reads the files, or they are malformed; the sentence says what is wrong.
    """
    try:
        return _loader(config, registry, path).tokenizer(path)
    except (OSError, ValueError) as error:
        raise ResourceError(f"the tokenizer of the model at {path} can't be read: {error}") from error


def _loader(config: EngineConfig, registry: Registry, path: Path) -> WeightLoader:
    chosen = config.model.loader
    if chosen.use != "auto":
        found = registry.get("weight_loaders", chosen.use)
        named: WeightLoader = found.build(found.offer.options.model_validate(chosen.options))
        return named
    for owned in sorted(registry.offers("weight_loaders"), key=lambda owned: -owned.offer.rank):
        loader: WeightLoader = owned.build(owned.offer.options())
        if loader.recognizes(path):
            return loader
    raise ResourceError(f"no installed weight loader recognizes {path}; see `engine plugins list`")


__all__ = ["load_tokenizer"]
