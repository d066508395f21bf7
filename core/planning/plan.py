"""A plan: what a configuration will take of a device and what it will do there, from the model's header alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from engine.capabilities import Flag
from engine.compose import PAGE_SIZE, ReadModel, compose, read_model
from engine.composition import Composition
from engine.config.model import EngineConfig
from engine.config.origins import Origins
from engine.device import DeviceProfile
from engine.errors import CompositionError, ResourceError
from engine.planning.kv import KVForm, compared, own_form
from engine.planning.ranks import RankFit, rank_fits
from engine.planning.weights import Kept, WeightGroup, group_weights, stored
from engine.registry import Registry
from engine.selection import Selector
from engine.specs.attention import KVLayout
from engine.specs.model import ModelProfile
from engine.specs.quantization import QuantizationOffer

ITEMSIZE: Final[Mapping[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pool:
    """The KV pool that the engine would cut on this device."""

    bytes_per_token: int
    page_size: int  # tokens
    pages: int
    bytes: int
    requests: int  # of the planned context that fit at once


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Everything that `engine plan` prints."""

    profile: ModelProfile
    dtype: str
    device: DeviceProfile
    context: int  # tokens of the requests that are planned for
    weights: tuple[WeightGroup, ...]  # empty when the implementation does not list them
    weight_bytes: int
    pool: Pool | None  # None when none can be cut; `blocked` says why
    forms: tuple[KVForm, ...]  # the model's own, then those to compare
    ranks: tuple[RankFit, ...]
    stored_bytes: int | None  # of the weights in an FP8 checkpoint, which this engine turns into `dtype`
    stored_ranks: tuple[RankFit, ...]  # with the weights as stored
    on: tuple[str, ...]
    off: tuple[str, ...]
    slow: tuple[str, ...]
    blocked: tuple[str, ...]  # why this engine would not start; empty when it would


def make_plan(
    config: EngineConfig,
    registry: Registry,
    device: DeviceProfile,
    path: Path,
    *,
    context: int | None = None,
    forms: Sequence[str] = (),
    origins: Origins | None = None,
) -> Plan:
    """Plan for the model at `path` (its `config.json` is enough).

    Args:
        context: tokens per request to plan for; the most that the configuration and the model allow if unset.
        forms: names of other forms of attention to compare with (see `engine.planning.kv.compared`).

    Raises:
        ConfigError, CompositionError, ResourceError: the model can't be read, or nobody implements it.
        ValueError: a form is unknown, or the context is longer than the model's.
    """
    known = origins or Origins()
    model = read_model(config, Selector(registry=registry, device=device, origins=known), path)
    most = min(config.model.max_context or model.profile.max_context, model.profile.max_context)
    if context is not None and not 0 < context <= most:
        raise ValueError(f"a context of {context} tokens was asked for, but this model holds 1 to {most}")
    asked = context or most
    blocked: list[str] = []
    composition = _composed(config, registry, device, path, known, blocked)
    groups = _groups(model, composition)
    weight_bytes = sum(g.bytes for g in groups) or model.profile.parameters * ITEMSIZE[model.dtype]
    form = own_form(model.profile, ITEMSIZE[model.dtype] if config.kv_cache.dtype == "fp8" else None)
    pool = _pool(config, model, form, composition, device, asked, weight_bytes, blocked)
    as_stored = _as_stored(model)

    divided = partial(
        rank_fits,
        model.profile,
        model.config,
        kv_itemsize=ITEMSIZE[model.dtype],
        memory_bytes=device.memory_bytes,
        context=asked,
        form=form,
    )
    return Plan(
        profile=model.profile,
        dtype=model.dtype,
        device=device,
        context=asked,
        weights=groups,
        weight_bytes=weight_bytes,
        pool=pool,
        forms=(form, *(compared(name, model.profile, model.config) for name in forms)),
        ranks=divided(groups),
        stored_bytes=sum(g.bytes for g in as_stored) or None,
        stored_ranks=divided(as_stored) if as_stored else (),
        on=tuple(_on(composition)),
        off=tuple(_off(config, composition)),
        slow=tuple(_slow(composition)),
        blocked=tuple(blocked),
    )


def _composed(
    config: EngineConfig, registry: Registry, device: DeviceProfile, path: Path, origins: Origins, blocked: list[str]
) -> Composition | None:
    try:
        return compose(config, registry, device, path, origins)
    except CompositionError as error:
        blocked.append(str(error))
        return None


def _groups(model: ReadModel, composition: Composition | None) -> tuple[WeightGroup, ...]:
    offer: Any = model.model.offer
    if offer.weights is None:
        return ()
    itemsize = ITEMSIZE[model.dtype]
    kept = Kept(dtype_bytes=itemsize, matrix_bytes=itemsize)
    quantization = composition.choices["quantization"].core if composition else None
    if composition and isinstance(quantization, QuantizationOffer):
        kept = Kept(
            dtype_bytes=itemsize,
            matrix_bytes=quantization.mean_bytes(composition.stored) or itemsize,
            copies_tied_head=quantization.copies_tied_head,
        )
    return group_weights(offer.weights(model.config), kept)


def _as_stored(model: ReadModel) -> tuple[WeightGroup, ...]:
    """The groups of a quantized checkpoint; none for a plain one."""
    offer: Any = model.model.offer
    kept = stored(model.config)
    return group_weights(offer.weights(model.config), kept) if kept and offer.weights else ()


def _pool(
    config: EngineConfig,
    model: ReadModel,
    form: KVForm,
    composition: Composition | None,
    device: DeviceProfile,
    context: int,
    weights: int,
    blocked: list[str],
) -> Pool | None:
    """Counted as the engine counts it, for pages that hold nothing but the model's elements."""
    from engine.kv_memory import count_pages, pool_bytes

    profile = model.profile
    size = (composition.page_size if composition else config.kv_cache.page_size) or PAGE_SIZE
    token = form.bytes_per_token(profile.layers, ITEMSIZE[model.dtype])
    layout = KVLayout(parts=(("kv", (size, token // profile.layers)),), dtype="uint8")
    try:
        pages = count_pages(
            config.kv_cache,
            layout,
            profile.layers,
            device,
            max_running=config.scheduler.max_running,
            max_context=min(config.model.max_context or profile.max_context, profile.max_context),
            page_size=size,
        )
    except ResourceError as error:
        blocked.append(str(error))
        return None
    taken = pool_bytes(layout, profile.layers, pages)
    if weights + taken > device.memory_bytes:
        blocked.append(
            f"weights of {_gib(weights)} and a KV pool of {_gib(taken)} do not fit into the {_gib(device.memory_bytes)}"
            f" of {device.name}"
        )
    return Pool(
        bytes_per_token=token,
        page_size=size,
        pages=pages,
        bytes=taken,
        requests=pages // -(-context // size),
    )


def _on(composition: Composition | None) -> Iterable[str]:
    """Each part that was taken."""
    for part, choice in composition.parts() if composition else ():
        yield f"{part}: {choice.name} ({choice.why})"


def _off(config: EngineConfig, composition: Composition | None) -> Iterable[str]:
    """What the engine can do and this configuration does not use."""
    if composition is None:
        return
    if "speculator" not in composition.choices:
        yield "speculation: speculator.use is none"
    if not composition.connectors:
        yield "KV transfer between engines: kv_connectors is empty"
    if not config.scheduler.overlap:
        yield "scheduling ahead: scheduler.overlap is false"
    elif "speculator" in composition.choices:
        yield "scheduling ahead: a speculator needs the last token before it can draft"
    if Flag.PREFIX_REUSE not in composition.choices["kv_cache"].core.capabilities.flags:
        yield f"prefix reuse: the KV cache {composition.choices['kv_cache'].name} does not offer it"


def _slow(composition: Composition | None) -> Iterable[str]:
    """Every candidate for a part that computes which ranks above the one taken, and why it was refused. What wraps
    another is none: it is as fast as what it wraps."""
    computing = {"model", "attention", "quantization", "executor"}
    for part, choice in composition.parts() if composition else ():
        for refusal in choice.refused if part in computing else ():
            if refusal.rank > choice.offer.rank and not refusal.offer.wraps:
                yield f"{part}: {choice.name} instead of the faster {refusal.name}, since: {'; '.join(refusal.reasons)}"


def _gib(count: int) -> str:
    return f"{count / 2**30:,.1f} GiB"


__all__ = ["ITEMSIZE", "Plan", "Pool", "make_plan"]
