"""Conformance of quantizations: the right rows, close to the dense product, and equal to it where that is promised."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from engine.capabilities import Flag, Needs
from engine.ops import select
from engine.specs.quantization import Linear, Quantization
from engine.testing.checkpoints import TensorWeights
from engine.testing.claims import proves
from engine.testing.offer import OfferConformance

WIDTH = 256
"""Input features: whole groups for every usual group size."""

ROWS = {"q.weight": 96, "k.weight": 32, "v.weight": 32}

ROUNDING = {"float32": 1e-5, "float16": 4e-3, "bfloat16": 2e-2}
"""What a lossless product may differ from the dense one, relative to its largest value."""

COARSE = 0.35
"""What any other may differ, in the norm of the product: four bits a weight come to about 0.1."""

FAITHFUL = 0.02
"""What a faithful product may differ: weights and inputs of 8 bits come to about 0.01."""

DTYPES = ("float32", "bfloat16", "float16")


def checkpoint() -> TensorWeights:
    """Three weights with biases, whose rows are all different."""
    random = torch.Generator().manual_seed(3)
    weights = {name: torch.randn(rows, WIDTH, generator=random) * 0.05 for name, rows in ROWS.items()}
    biases = {f"{name[0]}.bias": torch.randn(rows, generator=random) for name, rows in ROWS.items()}
    return TensorWeights(weights | biases)


EXPERTS = 3


def experts_checkpoint() -> TensorWeights:
    """Three small gated networks."""
    random = torch.Generator().manual_seed(4)
    names = [f"{part}.{expert}" for part in ("gate", "up", "down") for expert in range(EXPERTS)]
    return TensorWeights({name: torch.randn(WIDTH, WIDTH, generator=random) * WIDTH**-0.5 for name in names})


class QuantizationConformance(OfferConformance):
    """Subclasses set `offer` and `module`."""

    def pytest_generate_tests(self, metafunc: pytest.Metafunc) -> None:
        """Every dtype that the offer claims."""
        super().pytest_generate_tests(metafunc)
        self.each(metafunc, "dtype", "dtypes", DTYPES)

    def quantization(self, dtype: str) -> Quantization:
        """One with the options of the suite."""
        built = self.offer.build(self.options(), device=self.device, dtype=getattr(torch, dtype))
        assert isinstance(built, Quantization)
        return built

    def layer(self, dtype: str, *letters: str, bias: bool = False) -> Linear:
        """A layer of some of the weights."""
        biases = [f"{letter}.bias" for letter in letters] if bias else []
        names = [f"{letter}.weight" for letter in letters]
        return self.quantization(dtype).linear(checkpoint(), names, biases, torch.device(self.device.kind))

    def inputs(self, dtype: str, rows: int = 5) -> Tensor:
        """Rows that differ from each other."""
        x = torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(rows))
        return x.to(self.device.kind, getattr(torch, dtype))

    def dense(self, x: Tensor, *letters: str, bias: bool = False) -> Tensor:
        """The product in float64, with weights rounded to the dtype of x."""
        tensors = checkpoint().tensors
        parts = [
            x.double().cpu() @ tensors[f"{letter}.weight"].to(x.dtype).double().T
            + (tensors[f"{letter}.bias"].double() if bias else 0.0)
            for letter in letters
        ]
        return torch.cat(parts, dim=1)

    @proves("dtypes")
    def test_a_product_is_fresh_dense_and_of_the_input_s_dtype(self, dtype: str) -> None:
        """[T, in] -> [T, out] for any number of rows, the second call leaving the result of the first alone."""
        layer = self.layer(dtype, "q")
        assert (layer.out_features, layer.in_features) == (96, WIDTH)
        for rows in (1, 2, 7, 33):
            x = self.inputs(dtype, rows)
            first = layer(x)
            kept = first.clone()
            layer(x + 1)
            assert first.shape == (rows, 96)
            assert first.dtype is x.dtype
            assert first.is_contiguous()
            assert torch.equal(first, kept), "a later call overwrote the result"

    @proves("dtypes")
    def test_close_to_the_dense_product(self, dtype: str) -> None:
        """Even the coarsest one computes the same function."""
        x = self.inputs(dtype)
        got, want = self.layer(dtype, "q")(x).cpu().double(), self.dense(x, "q")
        assert (got - want).norm() / want.norm() < COARSE

    @proves("flags:lossless")
    def test_lossless_equals_the_dense_product(self, dtype: str) -> None:
        """Up to the rounding of the dtype."""
        self.require(Needs(flags=frozenset({Flag.LOSSLESS})))
        x = self.inputs(dtype, 9)
        got, want = self.layer(dtype, "q", "k", bias=True)(x).cpu().double(), self.dense(x, "q", "k", bias=True)
        assert (got - want).abs().max() <= ROUNDING[dtype] * want.abs().max()

    @proves("flags:faithful")
    def test_faithful_is_close_to_the_dense_product(self, dtype: str) -> None:
        """To what 8 bits come to; that a text's perplexity stays within 1 % is for a test with a real model."""
        self.require(Needs(flags=frozenset({Flag.FAITHFUL})))
        x = self.inputs(dtype, 9)
        got, want = self.layer(dtype, "q", "k", bias=True)(x).cpu().double(), self.dense(x, "q", "k", bias=True)
        assert (got - want).norm() / want.norm() < FAITHFUL

    def test_rows_stand_in_the_order_of_the_names(self, dtype: str) -> None:
        """A merged layer is its parts side by side, whatever their order."""
        x = self.inputs(dtype)
        merged = self.layer(dtype, "v", "k", "q")(x).cpu().double()
        apart = torch.cat([self.layer(dtype, letter)(x).cpu().double() for letter in "vkq"], dim=1)
        assert merged.shape == apart.shape
        assert (merged - apart).norm() / apart.norm() < COARSE

    def test_biases_are_added(self, dtype: str) -> None:
        """Each to the rows of its weight."""
        x = torch.zeros(2, WIDTH, dtype=getattr(torch, dtype), device=self.device.kind)
        got = self.layer(dtype, "v", "k", bias=True)(x).cpu().double()
        torch.testing.assert_close(got, self.dense(x, "v", "k", bias=True), rtol=2e-2, atol=2e-2)

    def test_a_row_does_not_depend_on_its_neighbours(self, dtype: str) -> None:
        """Alone and in a batch, up to rounding."""
        layer, x = self.layer(dtype, "q"), self.inputs(dtype, 6)
        alone = torch.cat([layer(x[i : i + 1]) for i in range(6)]).double()
        assert (layer(x).double() - alone).abs().max() <= ROUNDING[dtype] * alone.abs().max()

    def test_the_head_of_a_tied_embedding(self, dtype: str) -> None:
        """[vocab, hidden] is a layer like any other."""
        embedding = checkpoint().tensors["q.weight"].to(self.device.kind, getattr(torch, dtype))
        head, x = self.quantization(dtype).head(embedding), self.inputs(dtype)
        got, want = head(x).cpu().double(), self.dense(x, "q")
        assert got.shape == want.shape
        assert (got - want).norm() / want.norm() < COARSE

    def test_experts_give_the_weighted_sum_of_those_chosen(self, dtype: str) -> None:
        """Each token's, whoever else chose them; parts that are left to the next norm count when they are summed."""
        assert self.error_of_experts(dtype) < COARSE

    @proves("flags:lossless")
    def test_lossless_experts_equal_the_dense_sum(self, dtype: str) -> None:
        """Up to the rounding of the dtype."""
        self.require(Needs(flags=frozenset({Flag.LOSSLESS})))
        assert self.error_of_experts(dtype) < ROUNDING[dtype]

    def error_of_experts(self, dtype: str) -> float:
        """Of the sums over two experts each, relative to those in float64, in the norm."""
        device, kind = torch.device(self.device.kind), getattr(torch, dtype)
        tensors = experts_checkpoint().tensors
        names = [[f"{part}.{expert}" for part in ("gate", "up", "down")] for expert in range(EXPERTS)]
        experts = self.quantization(dtype).experts(TensorWeights(tensors), names, device)
        x, ids = self.inputs(dtype, 5), torch.tensor([[0, 2], [2, 1], [0, 1], [2, 0], [2, 1]], device=device)
        weights = torch.rand(5, 2, generator=torch.Generator().manual_seed(1)).to(device)
        ops = select(self.device, kind)
        with torch.inference_mode():
            got = experts(x, ids.int() if device.type == "cuda" else ids, weights, ops)
        assert got.dtype is kind
        got = (got if got.dim() == 2 else got.sum(1)).cpu().double()
        want = torch.zeros(5, WIDTH, dtype=torch.float64)
        for token, (chosen, factors) in enumerate(zip(ids.tolist(), weights.tolist(), strict=True)):
            for expert, factor in zip(chosen, factors, strict=True):
                gate, up, down = (tensors[name].to(kind).double() for name in names[expert])
                states = x[token].double().cpu()
                want[token] += factor * (down @ (torch.nn.functional.silu(gate @ states) * (up @ states)))
        assert experts.weight_bytes() > 0
        return float((got - want).norm() / want.norm())

    def test_bytes_are_counted_and_a_dense_weight_is_the_weight(self, dtype: str) -> None:
        """Of `dense`, None is the other possible answer."""
        layer = self.layer(dtype, "q")
        assert layer.weight_bytes() > 0
        dense = layer.dense()
        if dense is not None:
            assert torch.equal(dense.cpu(), checkpoint().tensors["q.weight"].to(dense.dtype))

    def test_a_missing_weight_is_an_error(self, dtype: str) -> None:
        """That names it."""
        with pytest.raises((KeyError, ValueError), match=r"absent\.weight"):
            self.quantization(dtype).linear(checkpoint(), ["absent.weight"])


__all__ = ["QuantizationConformance"]
