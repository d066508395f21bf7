"""Weights in blocks: those of a file as they are, any others rounded; by the kernel and decoded."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
import torch
from torch import Tensor

from engine.device import detect
from engine.ops.kernels import QUANT_FEATURES, missing
from engine.plugins.quantization import blocks as plugin
from engine.plugins.quantization.blocks.quantization import BlockQuantization
from engine.plugins.quantization.blocks.rounding import dense, rounded, stacked, widened
from engine.specs.quantization import Linear
from engine.specs.weight_loader import Blocks
from engine.testing.checkpoints import TensorWeights
from engine.testing.offer import CPU
from engine.testing.quantization import QuantizationConformance

DEVICE = detect("cpu")
LACKING = missing(DEVICE, QUANT_FEATURES)
OFFERS = {offer.name: offer for offer in plugin.quantizations()}
needs_kernels = pytest.mark.skipif(LACKING is not None, reason=str(LACKING))
either_way = pytest.mark.parametrize(
    "kernels", [pytest.param(True, marks=needs_kernels), False], ids=["kernel", "plain"]
)


class Stored(TensorWeights):
    """A checkpoint of which some matrices are stored in blocks."""

    def __init__(self, blocks: Mapping[str, Blocks], **tensors: Tensor) -> None:
        super().__init__({name: dense(matrix) for name, matrix in blocks.items()} | tensors)
        self._blocks = blocks

    def blocks(self, name: str) -> Blocks | None:
        return self._blocks.get(name)


@needs_kernels
class TestBlocks(QuantizationConformance):
    offer = OFFERS["blocks"]
    module = "engine.plugins.quantization.blocks"
    device = DEVICE

    def test_plain_processor_is_refused(self) -> None:
        assert "the processor lacks avx512_bf16" in str(self.offer.available(CPU))


class TestInt8(QuantizationConformance):
    offer = OFFERS["int8"]
    module = "engine.plugins.quantization.blocks"
    device = DEVICE


class TestInt8WithoutKernels(QuantizationConformance):
    offer = OFFERS["int8"]
    module = "engine.plugins.quantization.blocks"
    device = CPU


class TestInt4(QuantizationConformance):
    offer = OFFERS["int4"]
    module = "engine.plugins.quantization.blocks"
    device = DEVICE


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape) + seed))


def matrix(bits: int, rows: int, width: int, offsets: bool = True, seed: int = 0) -> Blocks:
    """Random codes of the whole range."""
    random = torch.Generator().manual_seed(rows + seed)
    count = width // 32
    shape, dtype = ((rows, count, 16), torch.uint8) if bits == 4 else ((rows, count, 32), torch.int8)
    least, most = (0, 256) if bits == 4 else (-128, 128)
    return Blocks(
        bits=bits,
        codes=torch.randint(least, most, shape, generator=random, dtype=torch.int16).to(dtype),
        scale=draw(rows, count, seed=seed).half(),
        offset=draw(rows, count, seed=seed + 1).half() if offsets else None,
    )


def inputs_as_rounded(x: Tensor) -> Tensor:
    """float64: 8 bits by the largest magnitude of each 32."""
    values = x.float().unflatten(1, (-1, 32))
    most = values.abs().amax(-1, keepdim=True)
    inverse = torch.where(most > 0, torch.full_like(most, 127.0) / most, most)
    return ((values * inverse).round().double() * (most / 127).double()).flatten(1)


def layer(blocks: Blocks, bias: Tensor | None = None, kernels: bool = True) -> Linear:
    names = [] if bias is None else ["b"]
    source = Stored({"w": blocks}) if bias is None else Stored({"w": blocks}, b=bias)
    return BlockQuantization(8, kernels=kernels).linear(source, ["w"], names)


KINDS = pytest.mark.parametrize(("bits", "offsets"), [(4, True), (4, False), (8, False), (8, True)])


@needs_kernels
@KINDS
@pytest.mark.parametrize("size", [(96, 64), (33, 32), (200, 576), (5, 1536)], ids=str)
def test_kernel_multiplies_rounded_inputs_exactly(bits: int, offsets: bool, size: tuple[int, int]) -> None:
    weight = matrix(bits, *size, offsets)
    bias = draw(size[0])
    product = layer(weight, bias)
    for tokens in (0, 1, 2, 5, 6, 7, 64, 150):
        for dtype in (torch.float32, torch.bfloat16):
            x = draw(tokens, size[1]).to(dtype)
            y = product(x)
            want = inputs_as_rounded(x) @ dense(weight).double().T + bias.double()
            assert (y.dtype, y.shape, y.is_contiguous()) == (dtype, want.shape, True)
            room = 1e-5 * size[1] ** 0.5 * dense(weight).abs().max().item()
            torch.testing.assert_close(y.double(), want, rtol=1e-6 if dtype is torch.float32 else 2**-8, atol=room)


@either_way
@KINDS
def test_close_to_the_decoded_product(kernels: bool, bits: int, offsets: bool) -> None:
    weight, x = matrix(bits, 70, 256, offsets), draw(9, 256)
    got, want = layer(weight, kernels=kernels)(x).double(), x.double() @ dense(weight).double().T
    assert (got - want).norm() / want.norm() < (0.01 if kernels else 1e-6)


@needs_kernels
@KINDS
def test_row_does_not_depend_on_its_batch(bits: int, offsets: bool) -> None:
    """To the bit, so that a request's text is the same whoever its neighbours are."""
    product, x = layer(matrix(bits, 200, 576, offsets)), draw(300, 576).bfloat16()
    whole = product(x)
    for tokens in [*range(1, 20), 100, 299]:
        assert torch.equal(product(x[:tokens]), whole[:tokens])
        assert torch.equal(product(x[-tokens:]), whole[-tokens:])


@needs_kernels
def test_any_number_of_threads_gives_the_same_bits() -> None:
    from engine.plugins.quantization.blocks.kernel import make_layers

    weight, x = matrix(4, 1000, 576), draw(50, 576).bfloat16()
    outs = [make_layers(threads)(weight, None, True)(x[:rows]) for threads in (1, 2, 7) for rows in (1, 50)]
    assert all(torch.equal(out, outs[1][: len(out)]) for out in outs)


@needs_kernels
def test_strided_rows() -> None:
    product, wide = layer(matrix(4, 64, 32)), draw(20, 100).bfloat16()
    for x in (wide[:, 10:42], wide[::2, :32], wide[:1, 4:36]):
        assert torch.equal(product(x), product(x.contiguous()))


@either_way
@pytest.mark.parametrize("odd", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row(kernels: bool, odd: float) -> None:
    product, x = layer(matrix(4, 64, 64), kernels=kernels), draw(8, 64).bfloat16()
    clean = product(x)
    x[3, 40] = odd
    y = product(x)
    assert not y[3].isfinite().any()
    kept = [0, 1, 2, 4, 5, 6, 7]
    torch.testing.assert_close(y[kept], clean[kept], rtol=0 if kernels else 1e-2, atol=0 if kernels else 1e-2)


@needs_kernels
def test_inputs_too_small_for_a_scale_are_zero() -> None:
    x = torch.full((1, 32), 1e-39)
    assert torch.equal(layer(matrix(8, 4, 32))(x), torch.zeros(1, 4))


@either_way
def test_blocks_of_a_file_are_taken_as_they_are(kernels: bool) -> None:
    """Merged, too: 4 bits beside 8 become 8 without loss."""
    parts = {"q": matrix(4, 40, 64), "k": matrix(8, 33, 64, False), "v": matrix(4, 7, 64, False)}
    merged = BlockQuantization(8, kernels=kernels).linear(Stored(parts), list(parts))
    x = torch.eye(64)
    want = torch.cat([dense(part) for part in parts.values()]).T
    torch.testing.assert_close(merged(x), want, rtol=1e-5, atol=1e-5)
    assert (merged.out_features, merged.in_features, merged.dense()) == (80, 64, None)


@either_way
def test_four_bits_are_kept_and_eight_are_rounded_where_four_are_asked_for(kernels: bool) -> None:
    source = Stored({"four": matrix(4, 64, 64), "eight": matrix(8, 64, 64)})
    quantization = BlockQuantization(4, kernels=kernels)
    four, eight = quantization.linear(source, ["four"]), quantization.linear(source, ["eight"])
    assert four.weight_bytes() == eight.weight_bytes() == 64 * 2 * 20
    torch.testing.assert_close(four(torch.eye(64)).T, dense(source.blocks("four")), rtol=1e-5, atol=1e-5)
    assert not torch.allclose(eight(torch.eye(64)).T, source.get("eight", torch.float32), rtol=1e-3, atol=1e-3)


@either_way
def test_tied_head_comes_from_the_stored_blocks(kernels: bool) -> None:
    stored = matrix(8, 100, 64, False)
    source = Stored({"embedding": stored})
    embedding = source.get("embedding", torch.bfloat16)
    quantization, x = BlockQuantization(4, kernels=kernels), torch.eye(64).bfloat16()
    head = quantization.tied_head(source, "embedding", embedding)
    assert head(x).dtype is torch.float32
    torch.testing.assert_close(head(x).T, dense(stored), rtol=1e-5, atol=1e-5)
    from_embedding = quantization.head(embedding)(x)
    assert from_embedding.dtype is torch.float32
    torch.testing.assert_close(from_embedding.T, embedding.float(), rtol=0, atol=0.02 * embedding.abs().max().item())


@pytest.mark.parametrize(("bits", "steps"), [(8, 254), (4, 15)])
def test_rounding_is_by_at_most_half_a_step(bits: int, steps: int) -> None:
    weight = draw(20, 128)
    weight[3, 32:64] = 0.0
    weight[4, :32] = 1e-7
    values = weight.unflatten(1, (-1, 32))
    span = 2 * values.abs().amax(-1) if bits == 8 else values.amax(-1) - values.amin(-1)
    off = (dense(rounded(weight, bits)) - weight).unflatten(1, (-1, 32)).abs().amax(-1)
    slack = 2e-3 * values.abs().amax(-1) + 1e-7  # scales and offsets are float16
    assert (off <= span / steps / 2 + slack).all()
    assert torch.equal(dense(rounded(weight, bits))[3, 32:64], torch.zeros(32))


def test_widening_and_stacking_lose_nothing() -> None:
    four, eight = matrix(4, 6, 96), matrix(8, 3, 96, False)
    assert torch.equal(dense(widened(four)), dense(four))
    assert torch.equal(dense(stacked([four, eight])), torch.cat((dense(four), dense(eight))))
    assert stacked([eight, eight]).offset is None
    assert stacked([four, four]).bits == 4


def test_width_that_is_no_multiple_of_32_is_refused() -> None:
    source = TensorWeights({"w": draw(4, 48)})
    quantization = BlockQuantization(8, kernels=False)
    with pytest.raises(ValueError, match="a multiple of 32, but w has 48"):
        quantization.linear(source, ["w"])
    with pytest.raises(ValueError, match="a multiple of 32, but the embedding has 48"):
        quantization.head(source.tensors["w"])
