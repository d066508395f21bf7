"""Writes every product into the same tensor."""

from broken_parts import offer

from engine.hooks import hookimpl
from engine.testing.checkpoints import PlainLinear, PlainQuantization

CAUGHT_BY = "test_a_product_is_fresh_dense_and_of_the_input_s_dtype"


class Reusing(PlainLinear):
    buffer = None

    def __call__(self, x):
        out = super().__call__(x)
        if self.buffer is None or self.buffer.shape != out.shape:
            self.buffer = out
        return self.buffer.copy_(out)


class Quantization(PlainQuantization):
    def linear(self, source, names, bias=(), device=None):
        dense = super().linear(source, names, bias, device)
        return Reusing(dense._weight, dense._bias)


@hookimpl
def quantizations():
    return [offer(lambda options, *, device, dtype: Quantization(dtype))]
