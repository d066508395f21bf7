"""Packed linear layers: exact, the same for every batch, padded where sizes don't fit the panels."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch
from torch import Tensor

from engine.device import detect
from engine.ops.kernels import missing
from engine.plugin import Options
from engine.plugins.quantization import packed
from engine.specs.quantization import Linear, Quantization
from engine.specs.weight_loader import WeightSource
from engine.testing.offer import CPU
from engine.testing.quantization import QuantizationConformance

DEVICE = detect("cpu")
pytestmark = pytest.mark.skipif(missing(DEVICE) is not None, reason=str(missing(DEVICE)))


class Tensors(WeightSource):
    """A checkpoint in memory."""

    def __init__(self, **tensors: Tensor) -> None:
        self.tensors = tensors

    def names(self) -> Iterable[str]:
        return self.tensors

    def shape(self, name: str) -> tuple[int, ...]:
        return tuple(self.tensors[name].shape)

    def origin(self, name: str) -> str:
        return "memory"

    def get(self, name: str, dtype: torch.dtype, rows: slice | None = None) -> Tensor:
        return self.tensors[name][rows or slice(None)].to(dtype)

    def digest(self) -> str:
        return "memory"

    def close(self) -> None:
        pass


def draw(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


def make() -> Quantization:
    return packed.build(Options(), device=DEVICE, dtype=torch.bfloat16)


def layer(weight: Tensor, bias: Tensor | None = None) -> Linear:
    if bias is None:
        return make().linear(Tensors(w=weight), ["w"])
    return make().linear(Tensors(w=weight, b=bias), ["w"], ["b"])


def check(got: Tensor, x: Tensor, weight: Tensor, bias: Tensor | float = 0.0) -> None:
    """Within the rounding of the result and of a float32 sum."""
    want = x.double() @ weight.double().T + bias
    step = 2**-8 if got.dtype is torch.bfloat16 else 1e-6
    torch.testing.assert_close(got.double(), want, atol=2e-5 * weight.shape[1] ** 0.5, rtol=step)


class TestPackedOffer(QuantizationConformance):
    (offer,) = packed.quantizations()
    module = "engine.plugins.quantization.packed"
    device = DEVICE

    def test_plain_processor_is_refused(self) -> None:
        assert "the processor lacks avx512_bf16" in str(self.offer.available(CPU))


@pytest.mark.parametrize("tokens", [0, 1, 2, 5, 6, 7, 13, 64, 700])
@pytest.mark.parametrize("size", [(960, 576), (576, 1536), (100, 64), (1, 2), (33, 6)], ids=str)
def test_equals_the_dense_product(size: tuple[int, int], tokens: int) -> None:
    weight, x = draw(*size), draw(tokens, size[1])
    y = layer(weight)(x)
    assert y.shape == (tokens, size[0])
    assert y.dtype is torch.bfloat16
    assert y.is_contiguous()
    check(y, x, weight)


def test_row_does_not_depend_on_its_batch() -> None:
    """To the bit, so that a request's text is the same whoever its neighbours are."""
    product = layer(draw(200, 576))
    x = draw(700, 576)
    whole = product(x)
    for tokens in [*range(1, 40), 100, 333]:
        assert torch.equal(product(x[:tokens]), whole[:tokens])
        assert torch.equal(product(x[-tokens:]), whole[-tokens:])


def test_any_number_of_threads_gives_the_same_bits() -> None:
    from engine.plugins.quantization.packed.linear import PackedQuantization

    weight, x = draw(1000, 576), draw(50, 576)
    outs = [PackedQuantization(threads).head(weight)(x[:rows]) for threads in (1, 2, 7) for rows in (1, 50)]
    assert all(torch.equal(out, outs[1][: len(out)]) for out in outs)


def test_rows_of_several_weights_stand_in_order() -> None:
    parts = {"q": draw(70, 64), "k": draw(33, 64), "v": draw(5, 64)}
    merged = make().linear(Tensors(**parts), ["q", "k", "v"])
    assert (merged.out_features, merged.in_features) == (108, 64)
    x = draw(9, 64)
    check(merged(x), x, torch.cat(list(parts.values())))


def test_bias_is_added_before_the_rounding() -> None:
    weight, bias, x = draw(48, 64), draw(48), draw(3, 64)
    check(layer(weight, bias)(x), x, weight, bias.double())
    parts = {"a": draw(48, 64), "b": draw(17, 64), "c": draw(48), "d": draw(17)}
    both = make().linear(Tensors(**parts), ["a", "b"], ["c", "d"])
    check(both(x), x, torch.cat((parts["a"], parts["b"])), torch.cat((parts["c"], parts["d"])).double())


def test_strided_rows() -> None:
    weight, wide = draw(64, 32), draw(20, 100)
    product = layer(weight)
    for x in (wide[:, 10:42], wide[::2, :32], wide[:1, 4:36]):
        assert torch.equal(product(x), product(x.contiguous()))


def test_head_gives_unrounded_logits() -> None:
    embedding, x = draw(500, 576), draw(4, 576)
    head = make().head(embedding)
    logits = head(x)
    assert logits.dtype is torch.float32
    assert head.dense() is None
    check(logits, x, embedding)


def test_weights_lie_in_sequence_at_cache_lines() -> None:
    quantization = make()
    layers = [quantization.head(draw(100, 6)), quantization.head(draw(64, 576)), quantization.head(draw(31, 2))]
    assert [layer.weight_bytes() for layer in layers] == [128 * 6 * 2, 64 * 576 * 2, 32 * 2 * 2]
    from engine.ops.arena import BLOCK, CACHE_LINE, Arena

    arena = Arena()
    first, second = arena.take(100), arena.take(1)
    assert second.data_ptr() - first.data_ptr() == 2 * CACHE_LINE
    assert first.data_ptr() % CACHE_LINE == 0
    assert len(arena.take(BLOCK + 1)) == BLOCK + 1


def test_odd_width_is_refused() -> None:
    with pytest.raises(
        ValueError, match="quantization 'packed' needs weights of an even width, but w has 7; use 'none'"
    ):
        layer(draw(4, 7))


def test_nan_stays_in_its_row() -> None:
    weight, x = draw(64, 32), draw(8, 32)
    clean = layer(weight)(x)
    x[3, 1] = float("nan")
    y = layer(weight)(x)
    assert y[3].isnan().all()
    assert torch.equal(y[[0, 1, 2, 4, 5, 6, 7]], clean[[0, 1, 2, 4, 5, 6, 7]])
