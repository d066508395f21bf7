"""Configuration + plugins + device + model files -> a Composition. Reads a model's header, never a weight; no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from engine.capabilities import Flag, KVKind, Mask, Needs
from engine.composition import Composition
from engine.config.components import Named, named, refuse_orphans
from engine.config.model import EngineConfig, KVCacheSection
from engine.config.origins import Key, Origins
from engine.device import DeviceProfile
from engine.errors import CompositionError, PluginError, ResourceError
from engine.plugin import Offer, Options
from engine.registry import Registry
from engine.selection import Choice, Selector
from engine.specs.model import ANY_ARCHITECTURE, ModelProfile
from engine.specs.model_source import ModelFiles, ModelSource, Progress
from engine.stored_formats import choose_quantization, stored_formats

_BFLOAT16_CPUS = frozenset({"avx512_bf16", "amx_bf16"})
_BFLOAT16_CUDA = (8, 0)
_ELSEWHERE = frozenset({"tool_parsers", "reasoning_parsers", "rate_limits"})
"""Extension points whose components the HTTP process chooses; they are no part of a composition."""

PAGE_SIZE: Final = 16
"""Tokens, where neither the configuration nor the attention backend asks for another number."""

ROLES: Final[Mapping[str, frozenset[Flag]]] = {
    "producer": frozenset({Flag.PRODUCER}),
    "consumer": frozenset({Flag.CONSUMER}),
    "both": frozenset({Flag.PRODUCER, Flag.CONSUMER}),
}
"""What a KV connector must be able to do in each role."""


def resolve_source(
    config: EngineConfig, registry: Registry, progress: Progress, origins: Origins | None = None
) -> ModelFiles:
    """Where the model's files lie on this machine, fetched if need be.

    Raises:
        CompositionError: `model.source` is not `SCHEME:REST` or names a scheme that nobody offers.
        ResourceError: the files can't be had; the sentence says how to get them.
    """
    start = (origins or Origins()).near(("model", "source"))
    return find_files(config.model.source, registry, progress, f"{start}model.source")


def find_files(source: str, registry: Registry, progress: Progress, told: str) -> ModelFiles:
    """Where the files of SCHEME:REST lie on this machine; `told` is what an error calls the place that names them.

    Raises: as `resolve_source`.
    """
    scheme, colon, rest = source.partition(":")
    if not colon or not rest:
        schemes = ", ".join(f"{owned.offer.name}:" for owned in registry.offers("model_sources"))
        raise CompositionError(
            f"{told} is {source!r}, expected SCHEME:REST with one of the schemes {schemes}; "
            f"a folder or file is path:{source.strip(':')}"
        )
    try:
        owned = registry.get("model_sources", scheme)
    except PluginError as error:
        raise CompositionError(f"{told} is {source!r}: {error}") from None
    found: ModelSource = owned.build(owned.offer.options())
    try:
        files = found.resolve(rest, progress)
    except (OSError, ValueError) as error:
        raise ResourceError(f"{told} is {source!r}: {error}") from error
    return files


@dataclass(frozen=True, slots=True, kw_only=True)
class ReadModel:
    """What is known of a model once its header was read."""

    loader: Choice[Any]
    model: Choice[Any]
    config: Mapping[str, Any]  # the checkpoint's config.json or its equivalent
    profile: ModelProfile
    dtype: str  # of weights and activations


def read_model(config: EngineConfig, selector: Selector, path: Path) -> ReadModel:
    """Choose who reads and who implements the model at `path`; raises as `compose` does."""
    parts = {component.key: component for component in named(config)}
    base = Needs(device=selector.device.kind, compute_capability=selector.device.compute_capability)
    dtype = _dtype(config, selector.device)
    loader = _choose_loader(selector, parts["model", "loader"], path, base)
    model_config = _read_config(loader, path)
    model, profile = _choose_model(selector, parts["model", "implementation"], model_config, replace(base, dtype=dtype))
    return ReadModel(loader=loader, model=model, config=model_config, profile=profile, dtype=dtype)


def compose(
    config: EngineConfig, registry: Registry, device: DeviceProfile, path: Path, origins: Origins | None = None
) -> Composition:
    """Choose every part of the engine that serves the model at `path` (a folder or a file) on `device`.

    Args:
        origins: where the configuration's values came from, for errors with file and line.

    Raises:
        ConfigError: a component that is named isn't installed, or its options are wrong.
        CompositionError: parts don't fit; the sentence has every reason.
        ResourceError: the model's files are absent or malformed.
    """
    known = origins or Origins()
    build_seconds = config.plugins.build_seconds
    selector = Selector(registry=registry, device=device, origins=known, build_seconds=build_seconds)
    parts = {component.key: component for component in named(config)}
    for component in parts.values():
        refuse_orphans(component, known)
    selector.settle(component for component in parts.values() if component.point not in _ELSEWHERE)
    found = read_model(config, selector, path)
    profile, dtype = found.profile, found.dtype
    base = Needs(device=device.kind, compute_capability=device.compute_capability)
    max_context = _max_context(config, profile, known)
    kv = replace(base, dtype=dtype, kv_kind=profile.kv_kind, head_dim=profile.head_dim)
    stored = stored_formats(found.loader, path)
    attention = selector.choose(parts["attention",], _attention_needs(kv, config.kv_cache, profile))
    page_size = config.kv_cache.page_size or _page_size(attention.core)

    choices = {
        "loader": found.loader,
        "model": found.model,
        "attention": attention,
        "kv_cache": selector.choose(parts["kv_cache",], replace(base, page_size=page_size)),
        "quantization": choose_quantization(selector, parts["quantization",], replace(base, dtype=dtype), stored),
        "executor": selector.choose(parts["executor",], base),
        "scheduler": selector.choose(parts["scheduler",], base),
    }
    if not parts["speculator",].absent:
        choices["speculator"] = selector.choose(parts["speculator",], base)
    grammar = parts["grammar",]
    if grammar.chosen or (not grammar.absent and registry.offers(grammar.point)):
        choices["grammar"] = selector.choose(grammar, base)
    return Composition(
        config=config,
        device=device,
        model_path=path,
        model_config=found.config,
        profile=profile,
        dtype=dtype,
        max_context=max_context,
        page_size=page_size,
        stored=stored,
        choices=choices,
        connectors=tuple(
            selector.choose(parts["kv_connectors", i], replace(kv, page_size=page_size, flags=ROLES[section.role]))
            for i, section in enumerate(config.kv_connectors)
        ),
        observers=tuple(selector.choose(parts["observers", i], base) for i in range(len(config.observers))),
    )


def _dtype(config: EngineConfig, device: DeviceProfile) -> str:
    """bfloat16 where the device multiplies it in hardware, else float32, unless the configuration says."""
    if config.model.dtype != "auto":
        return config.model.dtype
    if device.kind == "cpu":
        native = bool(device.cpu_features & _BFLOAT16_CPUS)
    else:
        native = device.compute_capability is None or device.compute_capability >= _BFLOAT16_CUDA
    return "bfloat16" if native else "float32"


def _choose_loader(selector: Selector, component: Named, path: Path, needs: Needs) -> Choice[Any]:
    if not path.exists():
        raise ResourceError(f"the model's files are not at {path}; check model.source")

    def judge(offer: Offer[Any], options: Options) -> list[str]:
        # A loader that is named is taken at its user's word: `dummy` serves any folder that has a config.json.
        if offer.name == component.use or offer.build(options).recognizes(path):
            return []
        return [f"does not recognize {path.name}"]

    return selector.choose(component, needs, judge=judge)


def _read_config(loader: Choice[Any], path: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = loader.build().config(path)
    except (OSError, ValueError) as error:
        raise ResourceError(
            f"the model at {path} can't be read by the weight loader {loader.name!r}: {error}"
        ) from error
    return found


def _choose_model(
    selector: Selector, component: Named, model_config: Mapping[str, Any], needs: Needs
) -> tuple[Choice[Any], ModelProfile]:
    """The implementation of the checkpoint's architecture; one that names it goes before one that takes any."""
    architectures = model_config.get("architectures")
    if not isinstance(architectures, list) or not architectures:
        raise CompositionError('the model\'s config.json names no architecture; add "architectures": ["…"] to it')
    architecture = str(architectures[0])

    def judge(offer: Any, options: Options) -> list[str]:
        if not offer.architectures & {architecture, ANY_ARCHITECTURE}:
            return [f"does not implement {architecture}"]
        try:
            offer.profile(model_config)
        except ValueError as error:
            return [str(error)]
        return []

    def prefer(offer: Any) -> tuple[int, ...]:
        return (architecture in offer.architectures, offer.rank)

    choice = selector.choose(component, needs, judge=judge, prefer=prefer)
    offer: Any = choice.core
    return choice, offer.profile(model_config)


def _page_size(attention: Offer[Any]) -> int:
    """The usual one, or the smallest that the backend knows."""
    sizes = attention.capabilities.page_sizes
    return PAGE_SIZE if not sizes or PAGE_SIZE in sizes else min(sizes)


def _attention_needs(needs: Needs, section: KVCacheSection, profile: ModelProfile) -> Needs:
    windowed = {Mask.SLIDING_WINDOW} if any(window is not None for window in profile.windows) else set()
    softcap = {Flag.SOFTCAP} if profile.softcap is not None else set()
    form = Flag.PACKED_ROWS if profile.kv_kind is KVKind.MLA else Flag.PACKED_HEADS
    in_8_bits = {form} if section.dtype == "fp8" else set()
    return replace(
        needs,
        page_size=section.page_size,
        masks=frozenset({Mask.CAUSAL} | windowed),
        flags=frozenset(softcap | in_8_bits),
    )


def _max_context(config: EngineConfig, profile: ModelProfile, origins: Origins) -> int:
    asked = config.model.max_context or profile.max_context
    if asked > profile.max_context:
        key: Key = ("model", "max_context")
        raise CompositionError(
            f"{origins.near(key)}model.max_context is {asked}, but the model was trained for {profile.max_context} "
            "tokens; lower it or leave it out"
        )
    return asked


__all__ = ["PAGE_SIZE", "ROLES", "ReadModel", "compose", "find_files", "read_model", "resolve_source"]
