"""What every model implementation must keep, and a plain `Forward` to run one without an engine.

A test class names the offer and its module:

    class TestMine(ModelConformance):
        (offer,) = my_package.plugin.models()
        module = "my_package.plugin"

The checkpoint is a tiny random one of the first architecture of the offer that transformers can make; `architecture`
names another, and the fixture `checkpoint` may be overridden for what transformers doesn't know.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import pytest
import torch
from torch import Tensor

from engine.ops.reference import TorchOps
from engine.plugin import Flag, Needs, Offer
from engine.specs.model import ANY_ARCHITECTURE, Forward, Model, ModelOffer, ModelProfile
from engine.specs.quantization import Quantization
from engine.specs.weight_loader import WeightSource
from engine.testing.checkpoints import (
    CountingQuantization,
    PlainQuantization,
    TensorWeights,
    read_tensors,
    tiny_config,
    tiny_model,
)
from engine.testing.claims import proves
from engine.testing.offer import OfferConformance

if TYPE_CHECKING:
    from transformers import PreTrainedModel

FALLBACK = "Gemma2ForCausalLM"
"""What a model that takes every architecture is tried with."""

Checkpoint = tuple[Mapping[str, Any], WeightSource]


class DenseForward(Forward):
    """Attention over plain growing tensors, one pair per sequence and layer. Exact, slow, and without pages.

    Set `lengths` before each step: how many of its tokens belong to each sequence, in order.
    """

    def __init__(self, profile: ModelProfile, lengths: Sequence[int]) -> None:
        self.lengths = list(lengths)
        self.tapped: dict[int, Tensor] = {}
        self._profile = profile
        self._stored: dict[tuple[int, int], tuple[Tensor, Tensor]] = {}

    def attend(self, layer: int, q: Tensor, k: Tensor, v: Tensor | None) -> Tensor:
        if v is None:  # latent attention: the row's first columns are the values
            v = k[..., : self._profile.v_head_dim]
        parts = zip(*(tensor.split_with_sizes(self.lengths) for tensor in (q, k, v)), strict=True)
        return torch.cat([self._one(index, layer, *part) for index, part in enumerate(parts)])

    def tap(self, layer: int, hidden: Tensor) -> None:
        self.tapped[layer] = hidden.clone()

    def _one(self, sequence: int, layer: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if (sequence, layer) in self._stored:
            old_k, old_v = self._stored[sequence, layer]
            k, v = torch.cat((old_k, k)), torch.cat((old_v, v))
        self._stored[sequence, layer] = k.clone(), v.clone()
        groups = self._profile.heads // self._profile.kv_heads
        keys, values = (x.repeat_interleave(groups, dim=1).transpose(0, 1) for x in (k, v))
        scores = q.transpose(0, 1) @ keys.transpose(1, 2) * self._profile.scale
        if self._profile.softcap is not None:
            scores = torch.tanh(scores / self._profile.softcap) * self._profile.softcap
        distance = torch.arange(len(k) - len(q), len(k))[:, None] - torch.arange(len(k))
        window = self._profile.windows[layer]
        hidden = (distance < 0) | (distance >= (window or len(k)))
        weights = scores.masked_fill(hidden, float("-inf")).float().softmax(dim=-1).to(q.dtype)
        return (weights @ values).transpose(0, 1).contiguous()


class Keeping(DenseForward):
    """Wants the states of a few rows only."""

    def __init__(self, profile: ModelProfile, lengths: Sequence[int], kept: Tensor) -> None:
        super().__init__(profile, lengths)
        self._kept, self.asked = kept, False

    def keep(self, rows: Tensor) -> Tensor:
        self.asked = True
        return rows[self._kept]


def build_model(
    offer: ModelOffer,
    linears: Offer[Quantization] | None,
    config: Mapping[str, Any],
    weights: WeightSource,
    dtype: torch.dtype = torch.float32,
) -> Model:
    """Build a model on the CPU, with the reference operations; no quantization if None is given."""
    device = OfferConformance.device
    return offer.build(
        offer.options(),
        config=config,
        profile=offer.profile(config),
        weights=weights,
        linears=linears.build(linears.options(), device=device, dtype=dtype) if linears else PlainQuantization(dtype),
        ops=TorchOps(),
        device=torch.device("cpu"),
        dtype=dtype,
    )


@torch.inference_mode()
def run(model: Model, texts: Sequence[Sequence[int]], chunk: int | None = None) -> list[Tensor]:
    """Logits float32 [tokens, vocab] of each text, all computed in one ragged batch, `chunk` tokens a step."""
    step = DenseForward(model.profile, [])
    found: list[list[Tensor]] = [[] for _ in texts]
    longest = max(len(text) for text in texts)
    for start in range(0, longest, chunk or longest):
        parts = [list(text[start : start + (chunk or longest)]) for text in texts]
        step.lengths = [len(part) for part in parts]
        tokens = torch.tensor([token for part in parts for token in part])
        positions = torch.cat([torch.arange(start, start + length) for length in step.lengths])
        logits = model.logits(model.forward(tokens, positions, step)).clone()
        for rows, part in zip(found, logits.split_with_sizes(step.lengths), strict=True):
            rows.append(part)
    return [torch.cat(rows) for rows in found]


class ModelConformance(OfferConformance):
    """Subclasses set `offer` and `module`."""

    offer: ClassVar[ModelOffer]
    linears: ClassVar[Offer[Quantization] | None] = None  # the quantization to build with; none at all by default
    architecture: ClassVar[str | None] = None  # of the checkpoint

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Every dtype that the offer claims."""
        super().pytest_generate_tests(metafunc)
        self.each(metafunc, "dtype", "dtypes", ["bfloat16", "float32"])

    @pytest.fixture
    def original(self) -> PreTrainedModel | None:
        """The model of transformers that the checkpoint is taken from."""
        known = sorted(self.offer.architectures - {ANY_ARCHITECTURE}) or [FALLBACK]
        wanted = [self.architecture] if self.architecture else known
        return next((model for name in wanted if (model := tiny_model(name)) is not None), None)

    @pytest.fixture
    def checkpoint(self, original: PreTrainedModel | None, tiny_checkpoint: Callable[[str], Path]) -> Checkpoint:
        """Its config and weights under the names of its files; skips what transformers doesn't know."""
        if original is None:
            names = ", ".join(sorted(self.offer.architectures))
            pytest.skip(f"transformers can't make a small model of {names}; override `checkpoint` in a test class")
        return tiny_config(original), TensorWeights(read_tensors(tiny_checkpoint(type(original).__name__)))

    @pytest.fixture
    def built(self, checkpoint: Checkpoint) -> Model:
        """The model of the class's checkpoint."""
        return build_model(self.offer, self.linears, *checkpoint)

    @pytest.fixture
    def texts(self, built: Model) -> list[list[int]]:
        """Three texts of different lengths."""
        random = torch.Generator().manual_seed(5)
        return [torch.randint(built.profile.vocab_size, (n,), generator=random).tolist() for n in (17, 1, 9)]

    def test_profile_imports_no_torch(self, checkpoint: Checkpoint) -> None:
        """Composition reads profiles, and must stay instant."""
        code = (
            f"import json, sys, {self.module} as module\n"
            f"offer = next(o for o in module.models() if o.name == {self.offer.name!r})\n"
            "print(offer.profile(json.load(sys.stdin)).layers, 'torch' in sys.modules)"
        )
        found = subprocess.run(
            [sys.executable, "-c", code], input=json.dumps(checkpoint[0]), capture_output=True, text=True, check=True
        )
        assert found.stdout.split() == [str(self.offer.profile(checkpoint[0]).layers), "False"]

    @proves("contract", "kv_kinds")
    def test_profile_is_consistent(self, built: Model) -> None:
        """What the KV pool and the attention backend are sized by; its KV kind is one that the offer claims."""
        profile, kinds = built.profile, self.offer.capabilities.kv_kinds
        assert not kinds or profile.kv_kind in kinds
        assert len(profile.windows) == profile.layers
        assert profile.heads % profile.kv_heads == 0
        assert profile.parameters > 0
        assert profile.max_context > 0

    def test_logits_equal_transformers(self, checkpoint: Checkpoint, built: Model, texts: list[list[int]]) -> None:
        """In float32, with random weights whose logits are far from flat."""
        weights = checkpoint[1]
        theirs = tiny_model(checkpoint[0]["architectures"][0])
        if theirs is None or not isinstance(weights, TensorWeights):
            pytest.skip("the checkpoint is not one that transformers made for the kit")
        with torch.inference_mode():
            for text, ours in zip(texts, run(built, texts), strict=True):
                want = theirs(torch.tensor([text])).logits[0]
                assert want.std() > 0.2, "flat logits would prove nothing"
                torch.testing.assert_close(ours, want, rtol=0, atol=2e-4)

    def test_logits_are_float32(self, built: Model, texts: list[list[int]]) -> None:
        """Sampling counts on it."""
        for text, logits in zip(texts, run(built, texts), strict=True):
            assert logits.shape == (len(text), built.profile.vocab_size)
            assert logits.dtype is torch.float32
            assert logits.isfinite().all()

    @torch.inference_mode()
    def test_scores_are_the_logits(self, built: Model) -> None:
        """What the output layer makes, converted or not."""
        hidden = torch.randn(3, built.profile.hidden_size, generator=torch.Generator().manual_seed(2))
        logits = built.logits(hidden).clone()
        assert torch.equal(built.scores(hidden).float(), logits)

    @proves("dtypes")
    def test_every_dtype_computes_the_same(
        self, checkpoint: Checkpoint, built: Model, texts: list[list[int]], dtype: str
    ) -> None:
        """Up to its rounding, for most tokens: a router may choose otherwise where two experts are nearly equal.

        Logits come in float32 all the same.
        """
        model = build_model(self.offer, self.linears, *checkpoint, getattr(torch, dtype))
        ours, want = torch.cat(run(model, texts)), torch.cat(run(built, texts))
        assert ours.dtype is torch.float32
        assert ((ours - want).norm(dim=-1) / want.norm(dim=-1)).median() < 0.1

    def test_texts_of_a_batch_do_not_mix(self, built: Model, texts: list[list[int]]) -> None:
        """A ragged batch computes what each text alone computes."""
        for text, together in zip(texts, run(built, texts), strict=True):
            torch.testing.assert_close(together, run(built, [text])[0], rtol=0, atol=1e-4)

    def test_chunks_equal_the_whole(self, built: Model, texts: list[list[int]]) -> None:
        """Prefill may be cut anywhere; decoding is a chunk of one."""
        whole = run(built, texts[:1])[0]
        for chunk in (1, 5):
            torch.testing.assert_close(run(built, texts[:1], chunk)[0], whole, rtol=0, atol=1e-4)

    def test_states_that_are_kept_are_the_same(self, built: Model, texts: list[list[int]]) -> None:
        """A model may drop rows after its last layer's KV is stored; what it then returns is what stays, in order."""
        tokens, places = torch.tensor(texts[0]), torch.arange(len(texts[0]))
        kept = torch.tensor([1, len(tokens) - 1])
        step = Keeping(built.profile, [len(tokens)], kept)
        with torch.inference_mode():
            whole = built.forward(tokens, places, DenseForward(built.profile, [len(tokens)]))
            found = built.forward(tokens, places, step)
        torch.testing.assert_close(found, whole[kept] if step.asked else whole, rtol=0, atol=1e-4)

    @proves("flags:linears")
    def test_layers_come_from_the_quantization(self, checkpoint: Checkpoint) -> None:
        """Every product of a layer goes through a linear layer that the quantization made."""
        self.require(Needs(flags=frozenset({Flag.LINEARS})))
        made = CountingQuantization()
        linears: Any = Offer(name="counting", summary="counts", build=lambda options, **context: made)
        model = build_model(self.offer, linears, *checkpoint)
        assert made.layers >= 2 * model.profile.layers, f"only {made.layers} layers were asked for"

    @proves("flags:hidden_states")
    def test_taps_show_every_layer(self, built: Model, texts: list[list[int]]) -> None:
        """The state that enters each layer, and the one before the final norm; and the embedding of any tokens."""
        self.require(Needs(flags=frozenset({Flag.HIDDEN_STATES})))
        step = DenseForward(built.profile, [len(texts[0])])
        with torch.inference_mode():
            built.forward(torch.tensor(texts[0]), torch.arange(len(texts[0])), step)
        assert sorted(step.tapped) == list(range(built.profile.layers + 1))
        assert all(hidden.shape == (len(texts[0]), built.profile.hidden_size) for hidden in step.tapped.values())
        embedded = built.embed(torch.tensor([texts[0], texts[0][::-1]]))
        assert embedded.shape == (2, len(texts[0]), built.profile.hidden_size)
        torch.testing.assert_close(embedded[0], embedded[1].flip(0))

    def test_weights_are_counted(self, built: Model) -> None:
        """In float32: four bytes a parameter, a quantization's padding aside."""
        assert built.weight_bytes() >= 4 * built.profile.parameters * 0.99

    def test_missing_and_misshapen_tensors_are_refused(self, checkpoint: Checkpoint) -> None:
        """The sentence names the tensor."""
        config, weights = checkpoint
        name = max(weights.names(), key=lambda name: weights.shape(name))
        with pytest.raises(ValueError, match=name):
            build_model(self.offer, self.linears, config, Damaged(weights, name, shape=None))
        with pytest.raises(ValueError, match=name):
            build_model(self.offer, self.linears, config, Damaged(weights, name, shape=(3, 5)))


class Damaged(WeightSource):
    """A checkpoint in which one tensor is missing (shape None) or of another shape."""

    def __init__(self, inner: WeightSource, name: str, shape: tuple[int, ...] | None) -> None:
        self._inner, self._name, self._shape = inner, name, shape

    def names(self) -> list[str]:
        return [name for name in self._inner.names() if name != self._name or self._shape is not None]

    def shape(self, name: str) -> tuple[int, ...]:
        if name == self._name:
            if self._shape is None:
                raise KeyError(f"{self.origin(name)} lacks tensor {name}")
            return self._shape
        return self._inner.shape(name)

    def origin(self, name: str) -> str:
        return self._inner.origin(name)

    def get(self, name: str, dtype: torch.dtype, rows: slice | None = None) -> Tensor:
        if name != self._name:
            return self._inner.get(name, dtype, rows)
        return torch.zeros(self.shape(name), dtype=dtype)

    def digest(self) -> str:
        return self._inner.digest()

    def close(self) -> None:
        """The checkpoint belongs to the fixture."""


__all__ = ["DenseForward", "ModelConformance", "build_model", "run"]
