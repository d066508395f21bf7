"""What the matrix says of a pair is what composing does with it: for every pair of built-in components."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cache, reduce
from itertools import combinations, product
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.capabilities import DTYPES, Flag, KVKind
from engine.compose import ROLES, compose
from engine.config.components import PLACES
from engine.config.model import EngineConfig
from engine.device_profiles import load_profile
from engine.errors import CompositionError
from engine.fit import Placed, clashes
from engine.hooks import hookimpl
from engine.matrix import Table, fit, placed, tables
from engine.plugin import Options
from engine.registry import Registry
from engine.specs.model import ANY_ARCHITECTURE, ModelOffer, ModelProfile
from engine.specs.weight_loader import WeightLoader, WeightSource
from engine.tokenizer import Tokenizer

TOY = "ToyForCausalLM"
LLAMA = {
    "vocab_size": 64,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
DEEPSEEK = {
    "kv_lora_rank": 512,
    "q_lora_rank": None,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 64,
    "v_head_dim": 32,
    "rms_norm_eps": 1e-6,
    "moe_intermediate_size": 64,
    "n_routed_experts": 4,
    "n_shared_experts": 1,
    "num_experts_per_tok": 2,
    "first_k_dense_replace": 1,
    "moe_layer_freq": 1,
    "routed_scaling_factor": 1.0,
    "topk_method": "greedy",
    "scoring_func": "softmax",
    "norm_topk_prob": False,
    "n_group": 1,
    "topk_group": 1,
}
TINY: Mapping[str, Mapping[str, Any]] = {
    "toy": {"architectures": [TOY]},
    "llama": {"architectures": ["LlamaForCausalLM"], **LLAMA},
    "transformers": {"architectures": ["GPT2LMHeadModel"], **LLAMA},
    "deepseek": {"architectures": ["DeepseekV2ForCausalLM"], **LLAMA, **DEEPSEEK},
}
"""A config of each model; a model of a new kind needs one here."""


class Json(WeightLoader):
    """Stands for every weight loader: the file is the config."""

    def recognizes(self, path: Path) -> bool:
        return True

    def config(self, path: Path) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def tokenizer(self, path: Path) -> Tokenizer:
        raise AssertionError("composing needs no tokenizer")

    def open(self, path: Path, config: dict[str, Any]) -> WeightSource:
        raise AssertionError("composing reads no weight")


def toy_profile(config: Mapping[str, Any]) -> ModelProfile:
    return ModelProfile(
        architecture=TOY,
        layers=1,
        hidden_size=8,
        vocab_size=10,
        max_context=100,
        kv_kind=KVKind(config["kv_kind"]),
        heads=1,
        kv_heads=1,
        head_dim=config["head_dim"],
        v_head_dim=config["head_dim"],
        scale=0.5,
        windows=(None,),
        softcap=None,
        dtype="float32",
        eos_token_ids=(0,),
        parameters=1000,
    )


@cache
def installed() -> Registry:
    """The built-in offers without their builds and options, and a model for all needs."""
    discovered = Registry.discover()
    plugins = {}
    for point in dict.fromkeys(PLACES.values()):
        owned = [o.offer for o in discovered.offers(point) if o.entry.distribution == "engine-llm"]
        plain = (offer for offer in owned if not offer.wraps)
        offers = [replace(offer, options=Options, build=lambda options, **context: Json()) for offer in plain]
        if point == "models":
            flags = replace(offers[0].capabilities, kv_kinds=frozenset(), flags=frozenset(Flag))
            offers.append(
                ModelOffer(
                    name="toy",
                    summary="whatever is asked for",
                    build=lambda options, **context: None,
                    architectures=frozenset({TOY, ANY_ARCHITECTURE}),  # so that every loader can read it
                    profile=toy_profile,
                    capabilities=flags,
                )
            )
        plugins[point] = SimpleNamespace(**{point: hookimpl(lambda offers=offers: offers)})
    return Registry.of(plugins)


def components() -> list[Placed]:
    return [part for point in dict.fromkeys(PLACES.values()) for part in placed(installed(), point)]


def pairs() -> Iterator[tuple[Placed, Placed]]:
    return ((a, b) for a, b in combinations(components(), 2) if a.point != b.point)


def naming(part: Placed) -> dict[str, Any]:
    """The piece of configuration that names a component."""
    (key,) = (key for key, point in PLACES.items() if point == part.point)
    section: Any = {"use": part.offer.name}
    if part.point == "kv_connectors":
        role = next(role for role, flags in ROLES.items() if flags <= part.offer.capabilities.flags)
        section = [section | {"role": role}]
    if part.point == "observers":
        section = [section]
    for name in reversed(key):
        section = {str(name): section}
    return cast("dict[str, Any]", section)


def merged(one: dict[str, Any], other: dict[str, Any]) -> dict[str, Any]:
    """Both trees in one; the second goes before the first."""
    both = {key: merged(one[key], other[key]) for key in one.keys() & other.keys() if isinstance(one[key], dict)}
    return one | other | both


def candidates(one: Placed, other: Placed, limit: str, default: int) -> set[int]:
    """The default, and a value of a limit that both have, if they declare any."""
    limits = [getattr(part.offer.capabilities, limit) for part in (one, other)]
    common = frozenset.intersection(*(declared for declared in limits if declared)) if any(limits) else frozenset()
    return {default} | ({min(common)} if common else set())


def composes(one: Placed, other: Placed, device: str, path: Path) -> bool:
    """Whether any model, dtype and page size make an engine of the two."""
    model = next((part.offer.name for part in (one, other) if part.point == "models"), "toy")
    heads, sizes = candidates(one, other, "head_dims", 64), candidates(one, other, "page_sizes", 16)
    for kind, head_dim, page_size, dtype in product(KVKind, heads, sizes, sorted(DTYPES)):
        path.write_text(
            json.dumps({**TINY[model], "kv_kind": kind} | ({"head_dim": head_dim} if model == "toy" else {}))
        )
        free = {"kv_cache": {"use": "auto", "page_size": page_size}, "scheduler": {"use": "auto"}}
        tree = reduce(merged, [{**free, "model": {"dtype": dtype}}, naming(one), naming(other)])
        try:
            compose(EngineConfig.model_validate(tree), installed(), load_profile(device), path)
        except CompositionError:
            continue
        return True
    return False


@pytest.mark.parametrize("device", ["cpu", "cpu-avx512", "h200", "t4"])
def test_every_cell_is_what_composing_does(device: str, tmp_path: Path) -> None:
    profile, path = load_profile(device), tmp_path / "config.json"
    checked = {(str(a), str(b)): (not fit(a, b, profile), composes(a, b, device, path)) for a, b in pairs()}
    assert {pair: found for pair, found in checked.items() if found[0] is not found[1]} == {}
    assert {fits for fits, _ in checked.values()} == {True, False}


def test_a_clash_is_the_same_from_either_side() -> None:
    for one, other in pairs():
        assert bool(clashes(one, other)) == bool(clashes(other, one))


def test_the_tables_are_about_known_devices_roles_and_related_points() -> None:
    device = load_profile("h200")
    devices, roles, *others = tables(installed(), {"h200": device})
    assert (devices.rows, devices.columns, devices.names) == ("component", "device", ["h200"])
    assert len(devices.cells) == len(components())
    assert roles.names == list(ROLES)
    assert any((t.rows, t.columns) == ("KV cache", "scheduling policy") for t in others)
    assert all(isinstance(t, Table) and t.cells for t in others)
