"""Claims to be faithful and keeps four bits a weight, with one scale a row."""

from broken_parts import offer

from engine.capabilities import Flag
from engine.hooks import hookimpl
from engine.testing.checkpoints import PlainLinear, PlainQuantization

CAUGHT_BY = "test_faithful_is_close_to_the_dense_product"
FAILS = {"flags:faithful"}


class Coarse(PlainQuantization):
    def linear(self, source, names, bias=(), device=None):
        dense = super().linear(source, names, bias, device)
        steps = dense._weight.abs().amax(1, keepdim=True) / 7
        return Rounded((dense._weight / steps).round() * steps, dense._bias)


class Rounded(PlainLinear):
    def dense(self):
        return None


@hookimpl
def quantizations():
    return [offer(lambda options, *, device, dtype: Coarse(dtype), flags=frozenset({Flag.FAITHFUL}))]
