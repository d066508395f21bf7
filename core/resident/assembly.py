"""An engine's speculator while the engine is assembled: built, asked for its plan, and loaded beside the model."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from engine.capabilities import Flag, Mask, Needs, unmet
from engine.compose import find_files
from engine.composition import Composition
from engine.config.components import Named
from engine.config.origins import Origins
from engine.errors import ResourceError
from engine.kv_moves import KVMoves
from engine.ops import select
from engine.registry import Registry
from engine.resident.other_model import opener
from engine.resident.parts import ResidentParts
from engine.resident.planned import PlannedResident, plan_resident
from engine.selection import Selector
from engine.specs.attention import AttentionBackend, AttentionShape
from engine.specs.speculator import AnySpeculator, Checkpoint, ResidentSpeculator, Target

if TYPE_CHECKING:
    from engine.runner import KVPool
    from engine.specs.model import Model, NextModule
    from engine.specs.quantization import Quantization
    from engine.specs.weight_loader import WeightSource


@dataclass(frozen=True, slots=True, kw_only=True)
class Speculation:
    """What there is before the weights are read."""

    speculator: AnySpeculator | None
    resident: PlannedResident | None
    trees: bool  # the target's backend can verify them

    def bytes(self, pages: int) -> int:
        """Memory of the draft KV."""
        return self.resident.bytes(pages) if self.resident else 0

    def page_bytes(self) -> float:
        """Bytes that a page takes beside the target's."""
        return self.resident.page_bytes() if self.resident else 0.0


def plan_speculation(composition: Composition, registry: Registry, backend: AttentionBackend) -> Speculation:
    """Build the speculator that was chosen, if one was.

    Args:
        backend: the target's attention.

    Raises:
        EngineError: it can't be built, or can't draft for this model.
    """
    section, size = composition.config, composition.page_size
    masks = composition.choices["attention"].core.capabilities.masks
    trees = Mask.TREE in masks and _moves(backend, (), size) is not None
    if (choice := composition.choices.get("speculator")) is None:
        return Speculation(speculator=None, resident=None, trees=trees)
    slots = section.scheduler.max_running
    speculator: AnySpeculator = choice.build(profile=composition.profile, max_running=slots)
    resident = None
    if isinstance(speculator, ResidentSpeculator):
        checkpoint = Checkpoint(
            profile=composition.profile,
            config=composition.model_config,
            path=composition.model_path,
            dtype=composition.dtype,
            device=composition.device,
            page_size=size,
            max_draft=section.speculator.max_draft,
            trees=trees and Mask.TREE_LEVELS in masks,
            tokenizer=lambda: composition.choices["loader"].build().tokenizer(composition.model_path),
            open_model=opener(composition, registry),
            find=lambda source: find_files(source, registry, lambda share, words: None, "the source").path,
            find_linears=lambda name: _linears(name, composition, registry),
        )
        resident = plan_resident(
            choice.name,
            speculator,
            checkpoint,
            lambda shape: draft_attention(shape, composition, registry, trees=checkpoint.trees),
            slots,
        )
    return Speculation(speculator=speculator, resident=resident, trees=trees)


def _linears(name: str, composition: Composition, registry: Registry) -> Callable[[], Quantization]:
    device, dtype = composition.device, composition.dtype
    needs = Needs(device=device.kind, compute_capability=device.compute_capability, dtype=dtype)
    component = Named(("speculator", "options", "quantization"), "quantizations", name, {}, by_default=False)
    choice = Selector(registry=registry, device=device, origins=Origins()).choose(component, needs)
    return lambda: choice.build(device=device, dtype=getattr(torch, dtype))


def _moves(backend: AttentionBackend, pool: KVPool, page_size: int) -> KVMoves | None:
    try:
        return KVMoves(backend.kv_layout(), pool, page_size)
    except ValueError:
        return None


def moves_of(speculation: Speculation, backend: AttentionBackend, pool: KVPool, page_size: int) -> KVMoves | None:
    """What brings the KV of an accepted path of a tree to its place; None where trees can't be verified."""
    return _moves(backend, pool, page_size) if speculation.trees and speculation.speculator else None


def draft_attention(
    shape: AttentionShape, composition: Composition, registry: Registry, *, trees: bool
) -> AttentionBackend:
    """A backend for a resident's layers: the target's kind if it can, else the best that fits.

    Raises:
        ValueError: it refuses the shape.
        CompositionError: no installed backend fits.
    """
    device, page_size = composition.device, composition.page_size
    masks = {Mask.CAUSAL} | ({Mask.SLIDING_WINDOW} if any(shape.windows) else set())
    needs = Needs(
        device=device.kind,
        compute_capability=device.compute_capability,
        dtype=shape.dtype,
        kv_kind=shape.kind,
        page_size=page_size,
        head_dim=shape.head_dim,
        masks=frozenset(masks | ({Mask.TREE, Mask.TREE_LEVELS} if trees else set())),
    )
    choice = composition.choices["attention"]
    if unmet(choice.core.capabilities, needs):
        component = Named(("speculator", "attention"), "attention_backends", "auto", {}, by_default=True)
        choice = Selector(registry=registry, device=device, origins=Origins()).choose(component, needs)
    backend: AttentionBackend = choice.build(shape=shape, page_size=page_size, device=device)
    return backend


def load_resident(
    planned: PlannedResident, composition: Composition, model: Model, pages: int, max_positions: int
) -> ResidentParts:
    """Read the resident's weights and cut its KV; on the runner's thread, after the model.

    Raises:
        ResourceError: the weights are absent or malformed; the sentence says which.
    """
    choices, dtype = composition.choices, getattr(torch, composition.dtype)
    path, config = composition.model_path, dict(composition.model_config)
    device = torch.device(composition.device.kind)
    linears: Callable[..., Any] = choices["quantization"].build

    def open_weights() -> WeightSource:
        source: WeightSource = choices["loader"].build().open(path, config)
        return source

    def next_modules() -> Sequence[NextModule]:
        with closing(open_weights()) as source:
            return model.next_modules(source, linears(device=composition.device, dtype=dtype))

    target = Target(
        profile=replace(composition.profile, max_context=max_positions),
        embed=model.embed,
        logits=model.logits,
        open_weights=open_weights,
        next_modules=next_modules,
        linears=linears(device=composition.device, dtype=dtype),
        ops=select(composition.device, dtype),
        device=device,
        dtype=dtype,
        slots=planned.slots + 1,
        max_positions=max_positions,
    )
    name = choices["speculator"].name
    try:
        with torch.inference_mode():
            planned.speculator.load(target)
    except (OSError, ValueError, KeyError) as error:
        text = error.args[0] if isinstance(error, KeyError) and error.args else error
        raise ResourceError(f"the speculator {name!r} can't be loaded: {text}") from error
    flags = choices["speculator"].core.capabilities.flags
    chains = Flag.GRAPH_SAFE in flags and Flag.DRAFT_PROBS not in flags and not planned.plan.forks
    chain = composition.config.speculator.max_draft if chains else 0
    return planned.parts(pages, composition.profile.vocab_size, device, chain)


__all__ = ["Speculation", "draft_attention", "load_resident", "moves_of", "plan_speculation"]
