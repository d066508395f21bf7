from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from engine.config.model import EngineConfig
from engine.errors import EngineError, ResourceError
from engine.hooks import hookimpl
from engine.model_tokenizer import load_tokenizer
from engine.plugin import Offer, Options
from engine.registry import Registry
from engine.server.app import create_app
from engine.server.cli.serve import bind
from engine.server.lifecycle import serve
from engine.server.metrics import Metrics
from engine.server.state import ServerState
from engine.specs.weight_loader import WeightLoader, WeightSource
from engine.testing.client import ScriptedClient, say
from engine.testing.tokenizer import byte_tokenizer
from engine.tokenizer import Tokenizer


class Named(Options):
    ending: str = ".tiny"


class Loader(WeightLoader):
    """Recognizes files by their ending."""

    def __init__(self, options: Named, broken: bool = False) -> None:
        self._ending, self._broken = options.ending, broken

    def recognizes(self, path: Path) -> bool:
        return path.suffix == self._ending

    def config(self, path: Path) -> dict[str, Any]:
        return {}

    def tokenizer(self, path: Path) -> Tokenizer:
        if self._broken:
            raise ValueError(f"{path.name} has no tokens")
        return byte_tokenizer()

    def open(self, path: Path, config: dict[str, Any]) -> WeightSource:
        raise OSError("there are no weights")


class Plugin:
    """Two loaders: one for any *.tiny, one that recognizes nothing and fails."""

    @hookimpl
    def weight_loaders(self) -> list[Offer[WeightLoader]]:
        def broken(options: Named) -> WeightLoader:
            return Loader(Named(ending=".never"), broken=True)

        return [
            Offer(name="tiny", summary="", build=Loader, options=Named),
            Offer(name="broken", summary="", build=broken, options=Named, rank=9),
        ]


REGISTRY = Registry.of({"loaders": Plugin()})


def config(**loader: Any) -> EngineConfig:
    return EngineConfig.model_validate({"model": {"loader": loader}})


def test_the_loader_that_recognizes_the_file_is_asked() -> None:
    assert load_tokenizer(config(), REGISTRY, Path("model.tiny")).vocab_size == 257


def test_a_loader_that_is_named_need_not_recognize_it() -> None:
    named = config(use="tiny", options={"ending": ".other"})
    assert load_tokenizer(named, REGISTRY, Path("model.tiny")).vocab_size == 257
    with pytest.raises(ResourceError, match=r"the tokenizer of the model at model\.tiny can't be read: .* no tokens"):
        load_tokenizer(config(use="broken"), REGISTRY, Path("model.tiny"))


def test_nobody_recognizes_it() -> None:
    with pytest.raises(ResourceError, match=r"no installed weight loader recognizes model\.bin"):
        load_tokenizer(config(), REGISTRY, Path("model.bin"))


def test_a_server_without_a_tokenizer_ends_with_the_reason() -> None:
    async def run() -> None:
        state = ServerState(
            client=ScriptedClient(say([97])), config=EngineConfig(), model="tiny", metrics=Metrics("tiny")
        )
        with bind("127.0.0.1", 0) as sock:
            await serve(
                state, create_app(state), sock, lambda: load_tokenizer(config(use="broken"), REGISTRY, Path("x"))
            )

    with pytest.raises(EngineError, match="has no tokens"):
        asyncio.run(run())
