"""What a candidate would cost per token, from the device's figures: to compare candidates, not to promise speed.

Decoding one stream reads every weight that takes part and the whole KV of the request once per token: bytes over
bandwidth, divided by the efficiency that the offer declares, if it does. A prompt is bound by arithmetic: two FLOPs per
weight and token, and in attention two per query head, width and pair of positions for QK and for PV; over the FLOP/s
of the dtype. (The roofline model; Williams, Waterman, Patterson, CACM 2009.) Launches, transfers and sampling are not
counted, so the truth is above.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final

from engine.device import DeviceProfile
from engine.device_profiles import with_figures
from engine.planning.kv import own_form
from engine.planning.weights import Kept, group_weights
from engine.plugin import Offer
from engine.specs.model import ModelOffer, ModelProfile
from engine.specs.quantization import QuantizationOffer

if TYPE_CHECKING:
    from engine.composition import Composition

TOKENS: Final = 4096
"""Length of the request that is estimated for, or the longest that the engine takes if that is shorter."""

_ITEMSIZE: Final[Mapping[str, int]] = {"float32": 4, "bfloat16": 2, "float16": 2}
_EXPERTS: Final = ("n_routed_experts", "num_experts", "num_local_experts")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cost:
    """Milliseconds of one stream, all layers together."""

    tokens: int
    decode_ms: float  # per token, with that many before it
    prefill_ms: float | None  # of a prompt of that many; None where the FLOP/s of the dtype are unknown
    measured: bool  # the offer declares its efficiency in decoding; if not, `decode_ms` is the device's limit

    def __str__(self) -> str:
        bound = "" if self.measured else "at least "
        prompt = "" if self.prefill_ms is None else f", prompt at least {_short(self.prefill_ms)} ms"
        return f"decode {bound}{_short(self.decode_ms)} ms/token{prompt}"


def cost(composition: Composition, point: str, offer: Offer[Any]) -> Cost | None:
    """What an offer would cost in a composition; None for parts that hardly compute, or for an unknown device."""
    work = {"attention_backends": _attention, "quantizations": _linears}.get(point)
    device = with_figures(composition.device)
    if work is None or device.bandwidth_bytes_per_s is None:
        return None
    tokens = min(TOKENS, composition.max_context)
    read, flops = work(composition, offer, tokens)
    share = offer.efficiency.get(device.kind)
    peak = _peak(device, composition.dtype)
    return Cost(
        tokens=tokens,
        decode_ms=1e3 * read / (device.bandwidth_bytes_per_s * (share or 1.0)),
        prefill_ms=1e3 * flops / peak if peak else None,
        measured=share is not None,
    )


def _peak(device: DeviceProfile, dtype: str) -> float | None:
    """FLOP/s in a dtype; what the device lacks it computes in float32."""
    return device.flops.get(dtype) or device.flops.get("float32")


def _attention(composition: Composition, offer: Offer[Any], tokens: int) -> tuple[float, float]:
    """Bytes read per decoded token, FLOPs of a prompt."""
    profile = composition.profile
    spans = [min(window or tokens, tokens) for window in profile.windows]
    itemsize = _ITEMSIZE[composition.dtype]
    form = own_form(profile, itemsize if composition.config.kv_cache.dtype == "fp8" else None)
    read = sum(spans) * form.bytes_per_token(profile.layers, itemsize) / profile.layers
    seen = sum(span * tokens - span * (span - 1) / 2 for span in spans)  # pairs of positions, over all layers
    return read, 2 * seen * profile.heads * (profile.head_dim + profile.v_head_dim)


def _linears(composition: Composition, offer: Offer[Any], tokens: int) -> tuple[float, float]:
    """The same for the products with weights."""
    width = offer.mean_bytes(composition.stored) if isinstance(offer, QuantizationOffer) else None
    taking_part = active_weights(composition.choices["model"].offer, composition.model_config, composition.profile)
    return taking_part * (width or _ITEMSIZE[composition.dtype]), 2.0 * taking_part * tokens


def active_weights(offer: Offer[Any], config: Mapping[str, Any], profile: ModelProfile) -> float:
    """Weights that take part in one token: no look-up table, and of routed experts those that are chosen.

    All weights of the profile where the implementation doesn't list them.
    """
    if not isinstance(offer, ModelOffer) or offer.weights is None:
        return float(profile.parameters)
    groups = {g.name: g.elements for g in group_weights(offer.weights(config), Kept(dtype_bytes=1, matrix_bytes=1.0))}
    if "output layer" in groups:
        groups.pop("embedding", None)  # else the embedding is the output layer as well
    experts = next((int(config[name]) for name in _EXPERTS if config.get(name)), 0)
    share = int(config.get("num_experts_per_tok") or experts) / experts if experts else 1.0
    return sum(count * (share if name == "routed experts" else 1.0) for name, count in groups.items())


def _short(milliseconds: float) -> str:
    return f"{milliseconds:,.0f}" if milliseconds >= 100 else f"{milliseconds:.3g}"


__all__ = ["TOKENS", "Cost", "active_weights", "cost"]
