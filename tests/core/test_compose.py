"""Composing: each part by name or by rank among those that fit, with every reason; no torch, no weights."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from engine.compose import compose
from engine.composition import Composition
from engine.config.load import load_config
from engine.device import DeviceProfile
from engine.errors import CompositionError, ConfigError, EngineError, ResourceError
from engine.hooks import hookimpl
from engine.plugin import Capabilities, Flag, KVKind, Mask, Offer, Options
from engine.registry import Registry
from engine.specs.model import ANY_ARCHITECTURE, Model, ModelOffer, ModelProfile
from engine.specs.observer import Observer, RequestEvent
from engine.specs.weight_loader import WeightLoader, WeightSource
from engine.tokenizer import Tokenizer

CPU = DeviceProfile(kind="cpu", name="a CPU", memory_bytes=2**34, cores=2)
FAST_CPU = replace(CPU, cpu_features=frozenset({"avx512_bf16"}))
GPU = DeviceProfile(kind="cuda", name="a GPU", memory_bytes=2**36, cores=2, compute_capability=(8, 0))

PROFILE = ModelProfile(
    architecture="ToyForCausalLM",
    layers=2,
    hidden_size=8,
    vocab_size=10,
    max_context=100,
    kv_kind=KVKind.GQA,
    heads=2,
    kv_heads=1,
    head_dim=4,
    v_head_dim=4,
    scale=0.5,
    windows=(None, None),
    softcap=None,
    dtype="float32",
    eos_token_ids=(0,),
    parameters=1000,
)


class Loader(WeightLoader):
    """Recognizes files with its suffix; the file is the config."""

    def __init__(self, suffix: str) -> None:
        self.suffix = suffix

    def recognizes(self, path: Path) -> bool:
        return path.suffix == self.suffix

    def config(self, path: Path) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(path.read_text())
        return found

    def tokenizer(self, path: Path) -> Tokenizer:
        raise AssertionError("composing needs no tokenizer")

    def open(self, path: Path, config: dict[str, Any]) -> WeightSource:
        raise AssertionError("composing reads no weight")


class Echo(Observer):
    """Remembers what it was built with."""

    def __init__(self, options: Options, context: Mapping[str, Any]) -> None:
        self.built = options, dict(context)

    def receive(self, events: Sequence[RequestEvent]) -> None:
        raise AssertionError("nothing happens while composing")


def part(name: str, built: object = None, **more: Any) -> Offer[Any]:
    return Offer(name=name, summary="for a test", build=lambda options, **context: built, **more)


def model(name: str, *architectures: str, profile: Any = lambda config: PROFILE, **more: Any) -> ModelOffer:
    return ModelOffer(
        name=name,
        summary="for a test",
        build=lambda options, **context: cast("Model", None),
        architectures=frozenset(architectures),
        profile=profile,
        **more,
    )


ATTENTION = Capabilities(kv_kinds=frozenset({KVKind.GQA}), masks=frozenset({Mask.CAUSAL}))
DENSE = Capabilities(flags=frozenset({Flag.LOSSLESS}))
BASE: Mapping[str, Sequence[Offer[Any]]] = {
    "weight_loaders": [part("json", Loader(".json"))],
    "models": [model("toy", "ToyForCausalLM")],
    "attention_backends": [part("plain", capabilities=ATTENTION)],
    "kv_caches": [part("radix")],
    "quantizations": [part("dense", capabilities=DENSE)],
    "executors": [part("here")],
    "scheduling_policies": [part("fcfs")],
}


def registry(**changed: Sequence[Offer[Any]]) -> Registry:
    """The base set with some points replaced, one plugin a point."""
    points = {**BASE, **changed}
    plugins = {hook: SimpleNamespace(**{hook: hookimpl(lambda o=offers: o)}) for hook, offers in points.items()}
    return Registry.of(plugins, distribution="acme")


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """A model of the toy architecture."""
    path = tmp_path / "model.json"
    path.write_text(json.dumps({"architectures": ["ToyForCausalLM"]}))
    return path


def composed(plugins: Registry, files: Path, *overrides: str, device: DeviceProfile = CPU) -> Composition:
    loaded = load_config(None, overrides)
    return compose(loaded.config, plugins, device, files, loaded.origins)


def refused(plugins: Registry, files: Path, *overrides: str, device: DeviceProfile = CPU) -> str:
    with pytest.raises(EngineError) as caught:
        composed(plugins, files, *overrides, device=device)
    assert isinstance(caught.value, CompositionError | ConfigError | ResourceError)
    return str(caught.value)


def test_a_whole_composition(files: Path) -> None:
    found = composed(registry(), files)
    assert {name: choice.name for name, choice in found.choices.items()} == {
        "loader": "json",
        "model": "toy",
        "attention": "plain",
        "kv_cache": "radix",
        "quantization": "dense",
        "executor": "here",
        "scheduler": "fcfs",
    }
    assert (found.profile, found.max_context, found.model_path) == (PROFILE, 100, files)
    assert found.model_config == {"architectures": ["ToyForCausalLM"]}
    assert found.choices["attention"].distribution == "acme 0"
    assert found.choices["attention"].why == "the only one that fits"
    assert found.choices["kv_cache"].why == "the default"
    assert (found.connectors, found.observers) == ((), ())


@pytest.mark.parametrize(
    ("device", "asked", "dtype"),
    [
        (CPU, "auto", "float32"),
        (FAST_CPU, "auto", "bfloat16"),
        (replace(CPU, cpu_features=frozenset({"amx_bf16"})), "auto", "bfloat16"),
        (GPU, "auto", "bfloat16"),
        (FAST_CPU, "float32", "float32"),
        (GPU, "float16", "float16"),
        (replace(GPU, compute_capability=(7, 5)), "auto", "float32"),
    ],
)
def test_the_dtype_follows_the_device(files: Path, device: DeviceProfile, asked: str, dtype: str) -> None:
    assert composed(registry(), files, f"model.dtype={asked}", device=device).dtype == dtype


def test_auto_takes_the_highest_rank_that_fits_and_says_why_not_the_others(files: Path) -> None:
    offers = [
        part("cuda_only", rank=30, capabilities=replace(ATTENTION, devices=frozenset({"cuda"}))),
        part("no_library", rank=20, capabilities=ATTENTION, available=lambda device: "libfoo is not installed"),
        part("good", rank=10, capabilities=ATTENTION),
        part("slow", rank=0, capabilities=ATTENTION),
    ]
    choice = composed(registry(attention_backends=offers), files).choices["attention"]
    assert choice.name == "good"
    assert choice.why == "the first of 2 that fit"
    assert {r.name: r.reasons for r in choice.refused} == {
        "cuda_only": ("device cpu is not among cuda",),
        "no_library": ("libfoo is not installed",),
        "slow": ("fits too, but good goes first",),
    }


def test_a_named_component_that_does_not_fit_is_an_error_with_every_reason(files: Path) -> None:
    narrow = Capabilities(devices=frozenset({"cuda"}), page_sizes=frozenset({64}), dtypes=frozenset({"bfloat16"}))
    plugins = registry(attention_backends=[part("flash", capabilities=narrow), part("plain", capabilities=ATTENTION)])
    assert refused(plugins, files, "attention=flash", "kv_cache.page_size=16") == (
        "--set attention: attention: the attention backend 'flash' can't be used here: "
        "device cpu is not among cuda; dtype float32 is not among bfloat16; kv_cache.page_size 16 is not among 64; "
        "lacks the causal mask"
    )


def test_when_nothing_fits_every_candidate_says_why(files: Path) -> None:
    offers = [part("a", capabilities=Capabilities()), part("b", available=lambda device: "not on Sundays")]
    said = refused(registry(attention_backends=offers), files)
    assert said == (
        "attention: no installed attention backend fits: a: lacks the causal mask | "
        "b: lacks the causal mask; not on Sundays"
    )
    assert "no executor is installed, or none may load" in refused(registry(executors=[]), files)


def test_a_compute_capability_below_the_floor_does_not_fit(files: Path) -> None:
    hopper = replace(ATTENTION, min_compute_capability=(9, 0))
    plugins = registry(attention_backends=[part("hopper", capabilities=hopper)])
    assert "compute capability 8.0 is below 9.0" in refused(plugins, files, device=GPU).replace("(8, 0)", "8.0")
    assert (
        composed(plugins, files, device=replace(GPU, compute_capability=(9, 0))).choices["attention"].name == "hopper"
    )


@pytest.mark.parametrize(
    ("changes", "need"),
    [
        ({"windows": (None, 16)}, "lacks the sliding_window mask"),
        ({"softcap": 30.0}, "lacks softcap"),
        ({"kv_kind": KVKind.MLA}, "KV kind mla is not among gqa"),
    ],
)
def test_what_the_model_needs_is_asked_of_attention(files: Path, changes: dict[str, Any], need: str) -> None:
    profile = replace(PROFILE, **changes)
    assert need in refused(registry(models=[model("toy", "ToyForCausalLM", profile=lambda c: profile)]), files)


def test_auto_never_takes_a_quantization_that_loses_but_a_name_does(files: Path) -> None:
    plugins = registry(quantizations=[part("dense", capabilities=DENSE), part("int4", rank=50)])
    assert composed(plugins, files).choices["quantization"].name == "dense"
    assert composed(plugins, files, "quantization=int4").choices["quantization"].name == "int4"


class Sized(Options):
    """Options, one of them required."""

    size: int
    colour: str = "red"


def test_options_reach_the_component_validated(files: Path) -> None:
    plugins = registry(kv_caches=[part("radix"), part("sized", options=Sized)])
    choice = composed(plugins, files, "kv_cache={use: sized, options: {size: 4}}").choices["kv_cache"]
    assert choice.options == Sized(size=4)
    assert "kv_cache.options.size is missing" in refused(plugins, files, "kv_cache=sized")
    said = refused(plugins, files, "kv_cache={use: sized, options: {size: 4, color: x}}")
    assert said.startswith("--set kv_cache: kv_cache.options.color is no known key; did you mean 'colour'?")


def test_build_hands_over_options_and_context(files: Path) -> None:
    echo = Offer(name="echo", summary="", build=lambda options, **context: Echo(options, context))
    (choice,) = composed(registry(observers=[echo]), files, "observers=[echo]").observers
    assert choice.build(loud=3).built == (Options(), {"loud": 3})


def test_the_configuration_says_how_long_a_build_may_take(files: Path) -> None:
    found = composed(registry(), files, "plugins.build_seconds=7")
    assert {choice.build_seconds for _, choice in found.parts()} == {7.0}


# the model


def test_an_implementation_that_names_the_architecture_goes_before_one_that_takes_any(files: Path) -> None:
    offers = [model("any", ANY_ARCHITECTURE, rank=99), model("toy", "ToyForCausalLM"), model("llama", "Llama")]
    choice = composed(registry(models=offers), files).choices["model"]
    assert choice.name == "toy"
    assert {r.name: r.reasons for r in choice.refused} == {
        "any": ("fits too, but toy goes first",),
        "llama": ("does not implement ToyForCausalLM",),
    }


def test_a_profile_that_refuses_the_config_leaves_the_model_to_the_next(files: Path) -> None:
    def picky(config: Mapping[str, Any]) -> ModelProfile:
        raise ValueError("rope_scaling type 'spiral' is not implemented")

    offers = [model("any", ANY_ARCHITECTURE), model("toy", "ToyForCausalLM", profile=picky)]
    found = composed(registry(models=offers), files)
    assert found.choices["model"].name == "any"
    said = refused(registry(models=offers), files, "model.implementation=toy")
    assert said.endswith("the model 'toy' can't be used here: rope_scaling type 'spiral' is not implemented")


def test_an_architecture_that_nobody_implements(files: Path) -> None:
    said = refused(registry(models=[model("llama", "LlamaForCausalLM")]), files)
    assert said == ("model.implementation: no installed model fits: llama: does not implement ToyForCausalLM")


@pytest.mark.parametrize("config", [{}, {"architectures": []}, {"architectures": None}])
def test_a_config_without_an_architecture(files: Path, config: dict[str, Any]) -> None:
    files.write_text(json.dumps(config))
    assert "names no architecture" in refused(registry(), files)


def test_the_loader_is_the_one_that_recognizes_the_files(files: Path) -> None:
    offers = [part("gguf", Loader(".gguf"), rank=9), part("json", Loader(".json"))]
    choice = composed(registry(weight_loaders=offers), files).choices["loader"]
    assert choice.name == "json"
    assert choice.refused[0].reasons == ("does not recognize model.json",)
    said = refused(registry(weight_loaders=offers), files.rename(files.with_suffix(".bin")))
    assert said.endswith("gguf: does not recognize model.bin | json: does not recognize model.bin")


def test_a_named_loader_is_taken_at_its_users_word(files: Path) -> None:
    offers = [part("json", Loader(".json")), part("dummy", Loader(".none"))]
    assert composed(registry(weight_loaders=offers), files, "model.loader=dummy").choices["loader"].name == "dummy"


def test_a_malformed_or_absent_model_is_a_resource_error(files: Path) -> None:
    files.write_text("{broken")
    with pytest.raises(ResourceError, match="can't be read by the weight loader 'json'") as caught:
        composed(registry(), files)
    assert caught.value.exit_code == 3
    with pytest.raises(ResourceError, match="the model's files are not at"):
        composed(registry(), files.with_name("elsewhere.json"))


def test_the_context_is_the_smaller_one_and_never_above_the_models(files: Path) -> None:
    assert composed(registry(), files, "model.max_context=64").max_context == 64
    assert refused(registry(), files, "model.max_context=101") == (
        "--set model.max_context: model.max_context is 101, but the model was trained for 100 tokens; "
        "lower it or leave it out"
    )


# optional parts


def test_a_speculator_is_there_only_when_asked_for(files: Path) -> None:
    plugins = registry(speculators=[part("ngram")])
    assert "speculator" not in composed(plugins, files).choices
    assert composed(plugins, files, "speculator=ngram").choices["speculator"].name == "ngram"
    assert composed(plugins, files, "speculator=auto").choices["speculator"].name == "ngram"


def test_connectors_must_have_the_flags_of_their_role(files: Path) -> None:
    plugins = registry(kv_connectors=[part("push", capabilities=Capabilities(flags=frozenset({Flag.PRODUCER})))])
    found = composed(plugins, files, "kv_connectors=[{use: push, role: producer}]")
    assert [c.name for c in found.connectors] == ["push"]
    assert "lacks consumer" in refused(plugins, files, "kv_connectors=[push]")


def test_observers_keep_the_order_of_the_list(files: Path) -> None:
    plugins = registry(observers=[part("a"), part("b")])
    assert [c.name for c in composed(plugins, files, "observers=[b, a]").observers] == ["b", "a"]


def test_options_without_a_component_are_refused(files: Path) -> None:
    assert "speculator.options is given while speculator.use is none" in (
        refused(registry(), files, "speculator.options.x=1")
    )


def test_an_unknown_component_is_named_with_its_place(files: Path) -> None:
    assert refused(registry(), files, "kv_cache=radx") == (
        "--set kv_cache: kv_cache: no KV cache named 'radx'; installed: radix; did you mean 'radix'?"
    )


# what people see


def test_explain_tells_what_was_taken_and_refused_in_order(files: Path) -> None:
    plugins = registry(kv_caches=[part("radix"), part("paged")], observers=[part("log")])
    rows = composed(plugins, files, "kv_cache=auto", "observers=[log]").explain()
    assert [(r.part, r.name, r.verdict) for r in rows if r.part in ("kv_cache", "observers.0")] == [
        ("kv_cache", "paged", "taken"),
        ("kv_cache", "radix", "fits"),
        ("observers.0", "log", "taken"),
    ]
    assert all(row.why for row in rows)


def test_as_dict_is_json_without_secrets(files: Path) -> None:
    found = composed(registry(), files, "server.api_keys.0=hunter2").as_dict()
    text = json.dumps(found)
    assert "hunter2" not in text
    assert json.loads(text)["parts"]["attention"] == {
        "point": "attention_backends",
        "name": "plain",
        "distribution": "acme 0",
        "why": "the only one that fits",
        "options": {},
        "candidates": [
            {
                "name": "plain",
                "verdict": "taken",
                "distribution": "acme 0",
                "reasons": ["the only one that fits"],
                "cost": None,
            }
        ],
    }
    assert found["model"]["architecture"] == "ToyForCausalLM"
