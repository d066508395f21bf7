"""Extension point: attention backends.

Collecting hook, asked once while the engine is composed. What an offer builds is called directly: `plan` once a step,
`forward` once a layer, both on the runner's thread. A backend decides how a page of KV is laid out; the core allocates.

Threads: `build` and `kv_layout` run once, at start-up. Then, on the runner's thread and under `torch.inference_mode`:
`plan` first, then `forward` for layers 0, 1, …, each once, then the next step. No two calls overlap.

Errors: `build` raises ValueError for a shape it can't serve. Whatever `plan` or `forward` raises fails the requests of
that step with its text; the engine goes on, and ends after several such steps in a row.

`build(options, *, shape: AttentionShape, page_size: int, device: DeviceProfile) -> AttentionBackend`
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Final

from engine.hooks import hookspec
from engine.plugin import KVKind, Offer

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from engine.latent.up import LatentUp
    from engine.ops import Ops
    from engine.specs.model import ModelProfile

API: Final = 1
HOOK: Final = "attention_backends"


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionShape:
    """What a model asks of attention; the same for all of its layers but for the window.

    For kind `mla`, `head_dim` is the width of a row, latent + rope (576 in DeepSeek), `v_head_dim` that of the latent
    (512), `kv_heads` is 1, and V is the first `v_head_dim` columns of the row.
    """

    kind: KVKind
    heads: int
    kv_heads: int
    head_dim: int
    v_head_dim: int
    scale: float
    windows: tuple[int | None, ...]  # per layer: tokens a query sees, itself included; None is all
    softcap: float | None
    dtype: str  # of queries, keys, values and of the cache
    expanded: tuple[int, int] | None = None  # mla: widths of a head's key and value when rows are expanded
    packed: bool = False  # the cache keeps 8 bits, as `engine.latent.rows.PackedRows` or `engine.eight_bits` has it

    @classmethod
    def of(cls, profile: ModelProfile, dtype: str, *, packed: bool = False) -> AttentionShape:
        """What the model of a profile asks of attention, computed in `dtype`."""
        return cls(
            kind=profile.kv_kind,
            heads=profile.heads,
            kv_heads=profile.kv_heads,
            head_dim=profile.head_dim,
            v_head_dim=profile.v_head_dim,
            scale=profile.scale,
            windows=profile.windows,
            softcap=profile.softcap,
            dtype=dtype,
            expanded=profile.expanded,
            packed=packed,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class KVLayout:
    """How one layer's pages are stored: one tensor per part, of shape `[num_pages, *part]`.

    `parts` maps a name ("k", "v", "latent") to the shape of one page. Pages are outermost, so that a page of a part is
    one run of bytes and a connector can move it without knowing what is inside. `axes` names the dimensions of each
    part: "token" is the one that counts tokens (or groups of them, whose members the later dimension "member" counts),
    "head" the KV heads, all other names are free. With them KV can be moved between engines of different page sizes,
    and the accepted path of a draft tree within its pages.

    The names of the parts say which of `Capabilities.layouts` this is, and the kit judges that claim by them
    alone: "k" and "v", in this order, are `split`; "latent" alone is `latent`; any other names are `packed`.
    """

    parts: tuple[tuple[str, tuple[int, ...]], ...]
    dtype: str
    axes: tuple[tuple[str, ...], ...] = ()


@dataclass(slots=True, kw_only=True)
class AttentionBatch:
    """The ragged batch of one step: R requests with T tokens in all, request r owning tokens query_start[r]:[r+1].

    The first `num_decodes` requests have exactly one token each and no tree. Host arrays describe the same batch as
    the tensors and may be read without a device sync; nothing here may be written by a backend.
    """

    query_start: Tensor  # int32 [R + 1]
    seq_lens: Tensor  # int32 [R]; tokens in the cache once this step's are stored
    block_tables: Tensor  # int32 [R, P]; page ids in order, rows padded with 0
    slot_mapping: Tensor  # int64 [T]; page id * page_size + offset; -1: not stored (padding of a captured step)
    positions: Tensor  # int64 [T]
    num_decodes: int
    query_lens_host: np.ndarray  # int32 [R]
    seq_lens_host: np.ndarray  # int32 [R]
    requests_repeat: bool = False
    """Some of the decodes are tokens of one request that follow each other: all keys must be stored before any query
    looks. All requests of such a batch are decodes."""
    may_share: bool = True
    """Whether several decodes may begin with the same pages. False spares a backend the search."""
    tree_masks: dict[int, Tensor] | None = None
    """Request index -> bool [q, m], m >= q: which of the last m tokens, its own new ones at the end, each new token
    sees; all before those are seen. Absent means causal. m is q for a backend that claims `tree` alone; for one that
    claims `tree_levels` it may be more, and then there is no window."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """Turns queries and keys by their positions; the arguments of `Ops.rope` that all layers share."""

    ops: Ops
    positions: Tensor  # int64 [T]
    cos_sin: Tensor  # float32 [positions, width]

    def turn(self, q: Tensor, k: Tensor) -> None:
        """In place."""
        self.ops.rope(q, k, self.positions, self.cos_sin)


class AttentionBackend(ABC):
    """Reads and writes the paged KV of one model."""

    reads_shared_once: ClassVar[bool] = False
    """Whether pages that several decodes begin with are read once for all of them, where `may_share` is set."""

    @abstractmethod
    def kv_layout(self) -> KVLayout:
        """The page layout this backend reads and writes."""

    @abstractmethod
    def plan(self, batch: AttentionBatch) -> Any:
        """Prepare what all layers of one step share. The result is handed to `forward` untouched."""

    @abstractmethod
    def forward(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None, kv: tuple[Tensor, ...], plan: Any) -> Tensor:
        """Store k and v at the slot mapping, then attend.

        Args:
            layer: index into `AttentionShape.windows`.
            q: [T, heads, head_dim], rotated; rows may be strided, the last axis is dense. For `mla` absorbed.
            k: [T, kv_heads, head_dim], rotated; for `mla` the whole latent row. Strides as for q.
            v: [T, kv_heads, v_head_dim]; None for `mla`.
            kv: this layer's parts, in the order of the layout.
            plan: what `plan` returned for this step.

        Returns:
            [T, heads, v_head_dim], contiguous, in the dtype of q.
        """

    def forward_rotated(
        self, layer: int, q: Tensor, k: Tensor, v: Tensor, kv: tuple[Tensor, ...], plan: Any, rotation: Rotation
    ) -> Tensor:
        """The same from q and k that are still to be rotated, so that a backend may do it as it reads them.

        They may be overwritten.
        """
        rotation.turn(q, k)
        return self.forward(layer, q, k, v, kv, plan)

    def forward_latent(
        self, layer: int, q: Tensor, rows: Tensor, up: LatentUp, kv: tuple[Tensor, ...], plan: Any
    ) -> Tensor:
        """For `mla`: the same from plain queries, so that the backend may expand rows where that is cheaper.

        What is right for all backends is to absorb; those that can do more are made from `engine.latent.backend`.

        Args:
            q: [T, heads, nope + rope], rotated; rows may be strided.
            rows: [T, head_dim], to be stored; strides as for q.
            up: the layer's up-projection.

        Returns:
            [T, heads, value], in the dtype of q.
        """
        return up.mixed(self.forward(layer, up.absorb(q), rows[:, None], None, kv, plan))


BUILDS: Final = AttentionBackend


@hookspec
def attention_backends() -> Iterable[Offer[AttentionBackend]]:  # type: ignore[empty-body]
    """Offer attention backends. Must not import torch."""


__all__ = [
    "API",
    "HOOK",
    "AttentionBackend",
    "AttentionBatch",
    "AttentionShape",
    "KVLayout",
    "Rotation",
    "attention_backends",
]
