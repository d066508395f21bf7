"""Which quantization `auto` takes for a file that keeps its matrices in blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.capabilities import Capabilities, Flag, Needs
from engine.config.components import named
from engine.config.load import load_config
from engine.errors import ResourceError
from engine.hooks import hookimpl
from engine.plugin import Offer
from engine.registry import Registry
from engine.selection import Choice, Selector
from engine.specs.quantization import Quantization, QuantizationOffer
from engine.stored_formats import choose_quantization, stored_formats
from engine.testing.offer import CPU


def build(options: object, **context: object) -> Quantization:
    raise AssertionError("nothing is built here")


DENSE = QuantizationOffer(
    name="dense", summary="", build=build, capabilities=Capabilities(flags=frozenset({Flag.LOSSLESS}))
)
BLOCKS = QuantizationOffer(
    name="blocks",
    summary="",
    build=build,
    capabilities=Capabilities(flags=frozenset({Flag.FAITHFUL})),
    rank=50,
    bytes_per_weight=2.0,
    formats={"Q4": 0.5},
)
LOSSY: Offer[Quantization] = Offer(name="lossy", summary="", build=build, rank=90)


def choose(stored: Mapping[str, int], *overrides: str) -> Choice[Any]:
    loaded = load_config(None, overrides)
    (component,) = [part for part in named(loaded.config) if part.key == ("quantization",)]
    plugin = SimpleNamespace(quantizations=hookimpl(lambda: [DENSE, BLOCKS, LOSSY]))
    registry = Registry.of({"quantizations": plugin}, distribution="acme")
    selector = Selector(registry=registry, device=CPU, origins=loaded.origins)
    return choose_quantization(selector, component, Needs(device="cpu"), stored)


def reasons(choice: Choice[Any]) -> dict[str, str]:
    return {refused.name: "; ".join(refused.reasons) for refused in choice.refused}


def test_blocks_are_taken_where_the_whole_file_has_them() -> None:
    choice = choose({"Q4": 10})
    assert choice.name == "blocks"
    assert reasons(choice)["lossy"] == "lacks faithful"


@pytest.mark.parametrize(
    ("stored", "kept"),
    [({}, "keeps no matrix in blocks"), ({"Q4": 10, "Q6": 1, "F16": 1}, "keeps matrices as F16, Q6")],
    ids=["dense", "mixed"],
)
def test_where_they_would_round_further_they_are_refused(stored: dict[str, int], kept: str) -> None:
    choice = choose(stored)
    assert choice.name == "dense"
    assert reasons(choice)["blocks"] == f"the file {kept}, which it would round further"


@pytest.mark.parametrize("name", ["dense", "blocks", "lossy"])
def test_what_is_named_is_taken(name: str) -> None:
    assert choose({}, f"quantization={name}").name == name


def test_bytes_per_weight_are_the_mean_over_a_file() -> None:
    assert BLOCKS.mean_bytes({}) == 2.0
    assert BLOCKS.mean_bytes({"Q4": 30, "F16": 10}) == 0.875
    assert replace(BLOCKS, formats={}).mean_bytes({"Q4": 30}) == 2.0
    assert DENSE.mean_bytes({"Q4": 30}) is None


class Malformed:
    def formats(self, path: Path) -> Mapping[str, int]:
        raise ValueError(f"{path} is cut off")


def test_a_malformed_file_is_an_error_with_its_loader() -> None:
    loader = cast("Choice[Any]", SimpleNamespace(name="toy", build=Malformed))
    with pytest.raises(ResourceError, match="at m can't be read by the weight loader 'toy': m is cut off"):
        stored_formats(loader, Path("m"))
