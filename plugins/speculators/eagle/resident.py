"""The head beside its target: what it asks of the engine, what it keeps per request, when it runs.

All calls come from the runner's thread. A request's slot holds two vectors, left by its last pair: the state that the
next step takes, and the one that tells the first draft token.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from engine.errors import EngineError
from engine.ops.kernels import QUANT_FEATURES, missing
from engine.plugin import KVKind
from engine.plugins.speculators.eagle import EagleOptions, TreeOptions
from engine.plugins.speculators.eagle.drafting import Drafting
from engine.plugins.speculators.eagle.files import BLOCK, HeadWeights, head_config, weight_file
from engine.plugins.speculators.eagle.head import Head, load
from engine.plugins.speculators.eagle.shape import HeadShape, read_shape
from engine.plugins.speculators.eagle.shipped import shipped_head
from engine.specs.attention import AttentionShape
from engine.specs.model import ModelProfile
from engine.specs.quantization import Quantization
from engine.specs.speculator import (
    Checkpoint,
    DraftBatch,
    Drafted,
    ExtendBatch,
    ResidentPlan,
    ResidentSpeculator,
    Target,
    TargetTaps,
)


class EagleSpeculator(ResidentSpeculator):
    """One head for one target."""

    _folder: Path
    _shape: HeadShape
    _linears: Callable[[], Quantization] | None  # None: the model's own
    _head: Head
    _drafting: Drafting
    _states: Tensor  # [slots, hidden]
    _outs: Tensor  # [slots, hidden]; the same memory where the two vectors are one

    def __init__(self, options: EagleOptions) -> None:
        self._source, self._tree, self._quantization = options.head, options.tree, options.quantization

    def plan(self, checkpoint: Checkpoint) -> ResidentPlan:
        """See `ResidentSpeculator.plan`: reads the head's config, no weight."""
        profile = checkpoint.profile
        self._folder = shipped_head(profile) if self._source is None else _found(self._source, checkpoint)
        self._shape = shape = _fitting(self._folder, profile)
        self._linears = _linears(self._quantization, shape, checkpoint)
        if not checkpoint.trees:
            self._tree = None
        return ResidentPlan(
            taps=TargetTaps(
                hidden_layers=shape.hidden_layers(profile.layers), final_hidden=shape.generation == "eagle"
            ),
            kv=AttentionShape(
                kind=KVKind.GQA,
                heads=shape.heads,
                kv_heads=shape.kv_heads,
                head_dim=shape.head_dim,
                v_head_dim=shape.head_dim,
                scale=shape.head_dim**-0.5,
                windows=(shape.window,),
                softcap=None,
                dtype=checkpoint.dtype,
            ),
            places=_places(self._tree, checkpoint.max_draft),
            forks=self._tree is not None,
        )

    def load(self, target: Target) -> None:
        """See `ResidentSpeculator.load`."""
        with closing(HeadWeights(weight_file(self._folder))) as source:
            self._head = head = load(
                self._shape,
                source,
                self._linears() if self._linears else target.linears,
                target.ops,
                max_positions=target.max_positions,
                device=target.device,
                dtype=target.dtype,
            )
        own = head.embedding
        self._drafting = Drafting(
            head=head,
            embed=target.embed if own is None else own.__getitem__,
            logits=target.logits if head.lm_head is None else head.lm_head,
        )
        self._states = torch.zeros(target.slots, self._shape.hidden, device=target.device, dtype=target.dtype)
        self._outs = torch.zeros_like(self._states) if head.two_states else self._states

    def extend(self, batch: ExtendBatch) -> None:
        """Pair each state of the target with the token after it."""
        assert batch.hidden is not None, "the target's states were asked for"
        embeddings = self._drafting.embed(batch.next_tokens)
        states = self._head.fuse(batch.hidden)
        states, outs = self._head.step(embeddings, states, batch.positions, partial(batch.step.attend, 0))
        self._states[batch.slots] = states[batch.last]
        if self._outs is not self._states:
            self._outs[batch.slots] = outs[batch.last]

    def draft(self, batch: DraftBatch) -> Drafted:
        """A chain, or a tree where there is room for more than one token."""
        states, room = self._states[batch.slots], max(batch.rooms)
        outs = states if self._outs is self._states else self._outs[batch.slots]
        if self._tree is None or room == 1:
            return self._drafting.chain(batch, states, outs, room)
        width = min(self._tree.top_k, self._shape.draft_vocab)
        depth = min(self._tree.depth, room)
        return self._drafting.tree(batch, states, outs, nodes=room, width=width, depth=depth)

    def weight_bytes(self) -> int:
        """See `ResidentSpeculator.weight_bytes`."""
        return self._head.weight_bytes()


def _found(source: str, checkpoint: Checkpoint) -> Path:
    try:
        return checkpoint.find(source)
    except EngineError as error:
        raise ValueError(f"its option head can't be followed: {error}") from error


def _fitting(folder: Path, profile: ModelProfile) -> HeadShape:
    """The head's shape, which must be made for such a target.

    Raises:
        ValueError: it is not, or its config asks for what is not implemented.
    """
    config = head_config(folder)
    try:
        shape = read_shape(config)
        shape.hidden_layers(profile.layers)
    except ValueError as error:
        raise ValueError(f"the draft head at {folder} can't be used: {error}") from None
    for name, wanted, there in (
        ("hidden size", shape.target_hidden, profile.hidden_size),
        ("vocabulary", shape.vocab, profile.vocab_size),
    ):
        if wanted != there:
            raise ValueError(
                f"the draft head at {folder} was made for a model with a {name} of {wanted}, but this model "
                f"({profile.architecture}) has {there}; use a head that was trained for it"
            )
    return shape


def _linears(name: str | None, shape: HeadShape, checkpoint: Checkpoint) -> Callable[[], Quantization] | None:
    """The quantization of the head's layers. It need not be as faithful as the model's: it changes no text, and a head
    is read once for every draft token."""
    if name is not None:
        return checkpoint.find_linears(name)
    widths = (shape.fc_input, shape.layer_input, shape.hidden, shape.intermediate, shape.heads * shape.head_dim)
    in_blocks = checkpoint.dtype == "bfloat16" and not any(width % BLOCK for width in widths)
    if not in_blocks or missing(checkpoint.device, QUANT_FEATURES):
        return None
    try:
        return checkpoint.find_linears("int8")
    except EngineError:  # it may be denied, or not installed
        return None


def _places(tree: TreeOptions | None, max_draft: int) -> int:
    """Most items that a draft stores: the last level has no children, so it isn't run."""
    if tree is None:
        return max_draft - 1
    return max(max_draft - 1, tree.top_k * (min(tree.depth, max_draft) - 1))


__all__ = ["EagleSpeculator"]
