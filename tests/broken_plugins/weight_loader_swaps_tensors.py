"""Gives k for v and v for k, which are of one shape."""

from broken_parts import offer

from engine.hooks import hookimpl
from engine.plugins.weight_loaders.safetensors.loader import SafetensorsLoader, weight_files
from engine.plugins.weight_loaders.safetensors.weights import SafetensorsWeights

CAUGHT_BY = "test_every_tensor_is_what_was_written"


class Weights(SafetensorsWeights):
    def get(self, name, dtype, rows=None):
        swapped = name.replace("k_proj", "?").replace("v_proj", "k_proj").replace("?", "v_proj")
        return super().get(swapped, dtype, rows)


class Loader(SafetensorsLoader):
    def open(self, path, config):
        return Weights(weight_files(path))


@hookimpl
def weight_loaders():
    return [offer(lambda options: Loader())]
