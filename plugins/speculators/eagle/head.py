"""A head as it is served: the mathematics of `engine.plugins.speculators.eagle.module` by the engine's kernels.

It knows no batch, no page and no draft; it runs on the runner's thread, a few times a step.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.ops import Ops
from engine.ops.rope_table import rope_table
from engine.plugins.speculators.eagle.files import HeadWeights
from engine.plugins.speculators.eagle.shape import HeadShape, tensors
from engine.specs.quantization import Linear, Quantization

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""q [T, heads, head_dim], k and v [T, kv_heads, head_dim], rotated -> [T, heads, head_dim]; stores k and v."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Norms:
    """All of a head's norm weights, in the dtype that it computes in."""

    feed_forward: Tensor  # [hidden]
    embedding: Tensor | None  # [hidden]; these two for EAGLE-3
    state: Tensor | None
    final: Tensor | None
    fused: Tensor | None  # [taps * target_hidden], over all states side by side
    taps: Sequence[Tensor]  # [target_hidden] each, one per state


class Head:
    """One head of any generation.

    Attributes:
        shape: what its mathematics depends on.
        target_ids: int64 [draft_vocab], the target's id of each draft id; None where they are the same.
        embedding: [vocab, hidden] of its own; None where it shares the target's.
        lm_head: [T, hidden] -> [T, draft_vocab]; None for a generation that uses the target's output layer.
    """

    def __init__(
        self,
        shape: HeadShape,
        ops: Ops,
        *,
        fc: Linear,
        qkv: Linear,
        out: Linear,
        gate_up: Linear,
        down: Linear,
        lm_head: Linear | None,
        norms: Norms,
        target_ids: Tensor | None,
        embedding: Tensor | None,
        cos_sin: Tensor,
    ) -> None:
        self.shape, self.target_ids, self.embedding = shape, target_ids, embedding
        self._ops, self._norms, self._cos_sin = ops, norms, cos_sin
        self._fc, self._qkv, self._out, self._gate_up, self._down = fc, qkv, out, gate_up, down
        self.lm_head = lm_head

    @property
    def two_states(self) -> bool:
        """Whether the state that the next step takes is another than the one that the output layer takes."""
        return self._norms.final is not None and not self.shape.norm_output

    def fuse(self, features: Tensor) -> Tensor:
        """The target's states [T, taps, target_hidden] as what a first step takes, [T, hidden], fresh memory."""
        if self.shape.generation == "eagle":
            return features.squeeze(1).clone()
        ops, eps = self._ops, self.shape.eps
        if self._norms.taps:
            normed = [ops.rms_norm(features[:, tap], weight, eps) for tap, weight in enumerate(self._norms.taps)]
            features = torch.cat(normed, -1)
        wide = features.flatten(1)
        return self._fc(wide if self._norms.fused is None else ops.rms_norm(wide, self._norms.fused, eps))

    def step(self, embeddings: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """One step for T tokens.

        Args:
            embeddings: [T, hidden] of the tokens that follow the states.
            states: [T, hidden]; overwritten.
            positions: int64 [T], those of the states.
            attend: stores the step's keys and values and attends to all before them.

        Returns:
            The states that the next step takes and those that the output layer takes, [T, hidden]; they may be one.
        """
        shape, ops, norms = self.shape, self._ops, self._norms
        residual, x = self._paired(embeddings, states)
        qkv = self._qkv(x).view(-1, shape.heads + 2 * shape.kv_heads, shape.head_dim)
        q, k, v = qkv.split_with_sizes((shape.heads, shape.kv_heads, shape.kv_heads), dim=1)
        ops.rope(q, k, positions, self._cos_sin)
        x = self._out(attend(q, k, v).flatten(1))
        x = ops.add_rms_norm(x, residual, norms.feed_forward, shape.eps)
        x = self._down(self._gate_up.gated(x, ops))
        if norms.final is None:
            residual += x
            return residual, residual
        normed = ops.add_rms_norm(x, residual, norms.final, shape.eps)
        return (normed if shape.norm_output else residual), normed

    def _paired(self, embeddings: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """The residual, and what q, k and v are made of."""
        norms, eps = self._norms, self.shape.eps
        if norms.embedding is None or norms.state is None:
            fused = self._fc(torch.cat((embeddings, states), -1))
            return fused, fused
        normed = self._ops.rms_norm(states, norms.state, eps)
        pair = torch.cat((self._ops.rms_norm(embeddings, norms.embedding, eps), normed), -1)
        return (normed if self.shape.norm_before_residual else states), pair

    def weight_bytes(self) -> int:
        """Bytes that the weights take in memory."""
        linears = (self._fc, self._qkv, self._out, self._gate_up, self._down, self.lm_head)
        return sum(x.weight_bytes() for x in linears if x is not None) + (
            0 if self.embedding is None else self.embedding.nbytes
        )


def load(
    shape: HeadShape,
    source: HeadWeights,
    linears: Quantization,
    ops: Ops,
    *,
    max_positions: int,
    device: torch.device,
    dtype: torch.dtype,
) -> Head:
    """Read a head's weights.

    Raises:
        ValueError: a tensor is missing, of another shape than the config says, not finite, or an id leads outside the
            target's vocabulary; the sentence names file and tensor.
    """
    expected = tensors(shape)
    if shape.hidden != shape.target_hidden:  # the target's embeddings are of another width
        expected["embed_tokens.weight"] = (shape.vocab, shape.hidden)
    source.expect(expected)

    def dense(name: str) -> Tensor:
        return source.get(f"{name}.weight", dtype).to(device)

    def linear(*names: str, biased: bool = False) -> Linear:
        bias = [f"{name}.bias" for name in names] if biased else []
        return linears.linear(source, [f"{name}.weight" for name in names], bias, device)

    at, eagle3 = "midlayer", shape.generation == "eagle3"
    attention = f"{at}.self_attn"
    qkv = [f"{attention}.{name}_proj" for name in ("q", "k", "v")]
    return Head(
        shape,
        ops,
        fc=linear("fc", biased=shape.fc_bias),
        qkv=linear(*qkv, biased=shape.attention_bias),
        out=linear(f"{attention}.o_proj", biased=shape.attention_bias),
        gate_up=linear(f"{at}.mlp.gate_proj", f"{at}.mlp.up_proj", biased=shape.mlp_bias),
        down=linear(f"{at}.mlp.down_proj", biased=shape.mlp_bias),
        lm_head=_output_layer(source, linears, device, dtype) if eagle3 else None,
        norms=Norms(
            feed_forward=dense(f"{at}.post_attention_layernorm"),
            embedding=dense(f"{at}.input_layernorm") if eagle3 else None,
            state=dense(f"{at}.hidden_norm") if eagle3 else None,
            final=dense("norm") if eagle3 else None,
            fused=dense("input_norm") if shape.norm_before_fc else None,
            taps=[dense(f"fc_norm.{tap}") for tap in range(shape.taps)] if shape.fc_norm else [],
        ),
        target_ids=_target_ids(shape, source, device),
        embedding=_own_embedding(shape, source, device, dtype),
        cos_sin=rope_table(shape.rope, max_positions).to(device),
    )


def _output_layer(source: HeadWeights, linears: Quantization, device: torch.device, dtype: torch.dtype) -> Linear:
    """Made like a tied one, whose results quantizations leave unrounded: the best of few near ones counts here."""
    name = "lm_head.weight"
    return linears.tied_head(source, name, source.get(name, dtype).to(device))


def _own_embedding(shape: HeadShape, source: HeadWeights, device: torch.device, dtype: torch.dtype) -> Tensor | None:
    name = "embed_tokens.weight"
    if not source.has(name):
        return None
    source.expect({name: (shape.vocab, shape.hidden)})
    return source.get(name, dtype).to(device)


def _target_ids(shape: HeadShape, source: HeadWeights, device: torch.device) -> Tensor | None:
    """`d2t` holds what is to be added to a draft id. Heads of the whole vocabulary may lack it."""
    if shape.generation == "eagle" or (not source.has("d2t") and shape.draft_vocab == shape.vocab):
        return None
    source.expect({"d2t": (shape.draft_vocab,)})
    ids = source.get("d2t", torch.int64) + torch.arange(shape.draft_vocab)
    if int(ids.min()) < 0 or int(ids.max()) >= shape.vocab:
        wrong = int(ids.min()) if int(ids.min()) < 0 else int(ids.max())
        raise ValueError(
            f"{source.origin('d2t')}: tensor d2t leads to token {wrong}, outside the target's vocabulary of "
            f"{shape.vocab}; the head belongs to another model"
        )
    if len(set(ids.tolist())) < len(ids):
        raise ValueError(f"{source.origin('d2t')}: tensor d2t leads from two draft ids to one token")
    return ids.to(device)


__all__ = ["Attend", "Head", "Norms", "load"]
