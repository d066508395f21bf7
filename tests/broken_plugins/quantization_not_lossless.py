"""Claims no loss and keeps eight bits a weight."""

from broken_parts import offer

from engine.capabilities import Flag
from engine.hooks import hookimpl
from engine.testing.checkpoints import PlainLinear, PlainQuantization

CAUGHT_BY = "test_lossless_equals_the_dense_product"
FAILS = {"flags:lossless"}


class Lossy(PlainQuantization):
    def linear(self, source, names, bias=(), device=None):
        dense = super().linear(source, names, bias, device)
        steps = dense._weight.abs().amax(1, keepdim=True) / 127
        return Rounded((dense._weight / steps).round() * steps, dense._bias)


class Rounded(PlainLinear):
    def dense(self):
        return None


@hookimpl
def quantizations():
    return [offer(lambda options, *, device, dtype: Lossy(dtype), flags=frozenset({Flag.LOSSLESS}))]
