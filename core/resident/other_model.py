"""A second model in one engine, composed by the rules that the first one was: for speculators that are models."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from dataclasses import replace
from typing import TYPE_CHECKING

from engine.capabilities import Needs
from engine.compose import read_model, resolve_source
from engine.composition import Composition
from engine.config.components import Named
from engine.config.model import ModelSection
from engine.config.origins import Origins
from engine.registry import Registry
from engine.selection import Selector
from engine.specs.speculator import OtherModel
from engine.stored_formats import choose_quantization, stored_formats

if TYPE_CHECKING:
    from engine.specs.model import Model


def opener(composition: Composition, registry: Registry) -> Callable[[str], OtherModel]:
    """What finds models by their source, for the device and the dtype of a composition."""
    return lambda source: open_model(source, composition, registry)


def open_model(source: str, composition: Composition, registry: Registry) -> OtherModel:
    """The model that `source` names, as `model.source` would.

    Raises:
        EngineError: it can't be had, or nobody can read it; one sentence says why.
    """
    device = composition.device
    config = composition.config.model_copy(update={"model": ModelSection(source=source)})
    path = resolve_source(config, registry, lambda share, detail: None).path
    selector = Selector(registry=registry, device=device, origins=Origins())
    found = read_model(config, selector, path)
    needs = Needs(device=device.kind, compute_capability=device.compute_capability, dtype=composition.dtype)
    component = Named(("speculator", "quantization"), "quantizations", "auto", {}, by_default=True)
    quantization = choose_quantization(selector, component, needs, stored_formats(found.loader, path))

    def load(max_positions: int) -> Model:
        import torch

        from engine.ops import select

        dtype: torch.dtype = getattr(torch, composition.dtype)
        with closing(found.loader.build().open(path, dict(found.config))) as weights:
            model: Model = found.model.build(
                config=dict(found.config),
                profile=replace(found.profile, max_context=max_positions),
                weights=weights,
                linears=quantization.build(device=device, dtype=dtype),
                ops=select(device, dtype),
                device=torch.device(device.kind),
                dtype=dtype,
            )
        return model

    return OtherModel(
        profile=found.profile, config=found.config, tokenizer=lambda: found.loader.build().tokenizer(path), load=load
    )


__all__ = ["open_model", "opener"]
