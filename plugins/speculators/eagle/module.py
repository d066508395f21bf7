"""A head's mathematics in plain differentiable torch: what training optimises and tests compare with.

Slow and simple on purpose; serving runs `engine.plugins.speculators.eagle.head`. Parameters carry the names of public
checkpoints, so that `state_dict()` is a checkpoint. Sources: EAGLE, arXiv 2401.15077; EAGLE-3, arXiv 2503.01840;
EAGLE-3.1's norms, arXiv 2605.09992.

A head is unrolled step by step. Step 0 pairs the target's states of position t with the embedding of token t + 1, at
rotary position t, and predicts token t + 2. Step i takes the state that step i - 1 left at t and the embedding of token
t + 1 + i, at rotary position t + i.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import cast

import torch
from torch import Tensor, nn
from torch.nn import functional

from engine.ops.rope_table import rope_table
from engine.plugins.speculators.eagle.shape import HeadShape


class Attend(ABC):
    """What attention does with the queries, keys and values of one step, and remembers of them for the next."""

    @abstractmethod
    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Rotated q [B, heads, T, head_dim], k and v [B, kv_heads, T, head_dim] -> [B, heads, T, head_dim]."""


class Unrolled(Attend):
    """Training-time test: step 0 is causal; in step i, position t sees step 0's keys up to t, and of each later step
    only its own chain's, which is position t's. So all T chains are drafted at once, as serving would draft each.

    Args:
        window: keys that a query sees, itself included; None is all.
    """

    def __init__(self, window: int | None = None) -> None:
        self._window = window
        self._true: tuple[Tensor, Tensor] | None = None  # step 0
        self._chains: list[tuple[Tensor, Tensor]] = []  # steps 1, 2, …

    def __call__(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        group = q.shape[1] // k.shape[1]
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
        if self._true is None:
            self._true = k, v
        else:
            self._chains.append((k, v))
        first_k, first_v = self._true
        length, steps = q.shape[2], len(self._chains)
        scores = [(q @ first_k.transpose(-1, -2)).masked_fill(self._hidden(length, steps, q.device), -torch.inf)]
        scores += [(q * chain_k).sum(-1, keepdim=True) for chain_k, _ in self._chains]
        weights = torch.softmax(torch.cat(scores, -1) * q.shape[-1] ** -0.5, -1)
        mixed = weights[..., :length] @ first_v
        for step, (_, chain_v) in enumerate(self._chains):
            mixed = mixed + weights[..., length + step, None] * chain_v
        return mixed

    def _hidden(self, length: int, steps: int, device: torch.device) -> Tensor:
        """bool [T, T]: the keys of step 0 that a query doesn't see after so many more steps."""
        at = torch.arange(length, device=device)
        ahead = at[:, None] - at
        seen = ahead >= 0
        return ~(seen & (ahead + steps < self._window) if self._window else seen)


class Norm(nn.Module):
    """RMS norm; statistics in float32."""

    def __init__(self, width: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(width))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        """[…, width] -> the same."""
        wide = x.float()
        return self.weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self._eps)).to(x.dtype)


class Attention(nn.Module):
    """The projections around `Attend`, with rotary positions."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        q, kv, bias = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim, shape.attention_bias
        self._head_dim = shape.head_dim
        self.q_proj = nn.Linear(shape.layer_input, q, bias=bias)
        self.k_proj = nn.Linear(shape.layer_input, kv, bias=bias)
        self.v_proj = nn.Linear(shape.layer_input, kv, bias=bias)
        self.o_proj = nn.Linear(q, shape.hidden, bias=bias)

    def forward(self, x: Tensor, cos_sin: Tensor, attend: Attend) -> Tensor:
        """[B, T, layer_input] -> [B, T, hidden]; cos_sin: float32 [B, T, rotated]."""
        q, k, v = (
            project(x).unflatten(-1, (-1, self._head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        mixed = attend(_rotated(q, cos_sin), _rotated(k, cos_sin), v)
        return cast(Tensor, self.o_proj(mixed.transpose(1, 2).flatten(2)))


class Mlp(nn.Module):
    """SwiGLU."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(shape.hidden, shape.intermediate, bias=shape.mlp_bias)
        self.up_proj = nn.Linear(shape.hidden, shape.intermediate, bias=shape.mlp_bias)
        self.down_proj = nn.Linear(shape.intermediate, shape.hidden, bias=shape.mlp_bias)

    def forward(self, x: Tensor) -> Tensor:
        """[…, hidden] -> the same."""
        return cast(Tensor, self.down_proj(functional.silu(self.gate_proj(x)) * self.up_proj(x)))


class Layer(nn.Module):
    """The one decoder layer."""

    def __init__(self, shape: HeadShape) -> None:
        super().__init__()
        self._normed_residual = shape.norm_before_residual
        self.self_attn = Attention(shape)
        self.mlp = Mlp(shape)
        self.post_attention_layernorm = Norm(shape.hidden, shape.eps)
        if shape.generation == "eagle3":
            self.input_layernorm = Norm(shape.hidden, shape.eps)
            self.hidden_norm = Norm(shape.hidden, shape.eps)

    def paired(self, embeddings: Tensor, states: Tensor) -> tuple[Tensor, Tensor]:
        """EAGLE-3: the residual [B, T, hidden] and what q, k and v are made of [B, T, 2 hidden], embedding first."""
        normed = self.hidden_norm(states)
        pair = torch.cat((self.input_layernorm(embeddings), normed), -1)
        return (normed if self._normed_residual else states), pair

    def forward(self, residual: Tensor, x: Tensor, cos_sin: Tensor, attend: Attend) -> Tensor:
        """The residual [B, T, hidden] after attention and feed-forward."""
        residual = residual + self.self_attn(x, cos_sin, attend)
        return cast(Tensor, residual + self.mlp(self.post_attention_layernorm(residual)))


class EagleModule(nn.Module):
    """One head of any generation.

    Buffers: `d2t` int64 [draft_vocab], what to add to a draft id for the target's id; `t2d` bool [vocab], the target's
    ids that have one. They start as the identity; `set_vocabulary` or a checkpoint sets them.
    """

    d2t: Tensor
    t2d: Tensor
    cos_sin: Tensor

    def __init__(self, shape: HeadShape, max_positions: int) -> None:
        super().__init__()
        self.shape = shape
        self.fc = nn.Linear(shape.fc_input, shape.hidden, bias=shape.fc_bias)
        self.midlayer = Layer(shape)
        self.register_buffer("cos_sin", rope_table(shape.rope, max_positions), persistent=False)
        if shape.generation == "eagle":
            return
        if shape.norm_before_fc:
            self.input_norm = Norm(shape.fc_input, shape.eps)
        if shape.fc_norm:
            self.fc_norm = nn.ModuleList([Norm(shape.target_hidden, shape.eps) for _ in range(shape.taps)])
        self.norm = Norm(shape.hidden, shape.eps)
        self.lm_head = nn.Linear(shape.hidden, shape.draft_vocab, bias=False)
        self.register_buffer("d2t", torch.zeros(shape.draft_vocab, dtype=torch.int64))
        self.register_buffer("t2d", torch.arange(shape.vocab) < shape.draft_vocab)

    def set_vocabulary(self, ids: Tensor) -> None:
        """Draft for these of the target's ids only: distinct, ascending, int64 [draft_vocab]."""
        self.d2t.copy_(ids - torch.arange(len(ids), device=ids.device))
        self.t2d.zero_()[ids.to(self.t2d.device)] = True

    def fuse(self, features: Tensor) -> Tensor:
        """The target's states of each token, [B, T, taps, target_hidden], as the state that step 0 takes.

        EAGLE-3: [B, T, hidden]. EAGLE-1 takes the state after the target's final norm as it is.
        """
        if self.shape.generation == "eagle":
            return features.squeeze(2)
        if self.shape.fc_norm:
            features = torch.stack([norm(tap) for norm, tap in zip(self.fc_norm, features.unbind(2), strict=True)], 2)
        wide = features.flatten(2)
        return cast(Tensor, self.fc(self.input_norm(wide) if self.shape.norm_before_fc else wide))

    def forward(self, embeddings: Tensor, states: Tensor, positions: Tensor, attend: Attend) -> tuple[Tensor, Tensor]:
        """One step of every chain.

        Args:
            embeddings: [B, T, hidden] of the tokens that follow the states.
            states: [B, T, hidden]; of `fuse` in step 0, else what the step before returned first.
            positions: int64 [B, T], rotary positions: t + i in step i.
            attend: the same object in all steps of one unrolling.

        Returns:
            The state that the next step takes, and the one that `logits` takes, both [B, T, hidden].
        """
        if self.shape.generation == "eagle":
            residual = x = self.fc(torch.cat((embeddings, states), -1))
        else:
            residual, x = self.midlayer.paired(embeddings, states)
        out = self.midlayer(residual, x, self.cos_sin[positions], attend)
        if self.shape.generation == "eagle":
            return out, out
        normed = self.norm(out)
        return (normed if self.shape.norm_output else out), normed

    def logits(self, hidden: Tensor) -> Tensor:
        """EAGLE-3: [B, T, hidden] -> [B, T, draft_vocab]. EAGLE-1 has no output layer: it uses the target's."""
        return cast(Tensor, self.lm_head(hidden))

    def target_ids(self, draft_ids: Tensor) -> Tensor:
        """The target's ids of draft ids, int64."""
        return draft_ids + self.d2t[draft_ids]


def _rotated(heads: Tensor, cos_sin: Tensor) -> Tensor:
    """[B, H, T, head_dim], the first half of its rotated elements turned with the second."""
    turned, rest = heads.split_with_sizes((cos_sin.shape[-1], heads.shape[-1] - cos_sin.shape[-1]), -1)
    cos, sin = cos_sin.unsqueeze(1).to(heads.dtype).chunk(2, -1)
    first, second = turned.chunk(2, -1)
    return torch.cat((first * cos - second * sin, second * cos + first * sin, rest), -1)


__all__ = ["Attend", "Attention", "EagleModule", "Layer", "Mlp", "Norm", "Unrolled"]
