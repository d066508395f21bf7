"""Fills up with zeros what is missing at the end of a file."""

import json

from broken_parts import offer
from safetensors.torch import load

from engine.hooks import hookimpl
from engine.plugins.weight_loaders.safetensors.loader import SafetensorsLoader
from engine.testing.checkpoints import TensorWeights

CAUGHT_BY = "test_damaged_files_are_refused_by_name"


class Loader(SafetensorsLoader):
    def open(self, path, config):
        raw = (path / "model.safetensors").read_bytes()
        head = 8 + int.from_bytes(raw[:8], "little")
        if len(raw) < head:
            raise ValueError(f"{path}/model.safetensors is cut off in its header")
        facts = json.loads(raw[8:head])
        end = max(fact["data_offsets"][1] for name, fact in facts.items() if name != "__metadata__")
        return TensorWeights(load(raw.ljust(head + end, b"\0")))


@hookimpl
def weight_loaders():
    return [offer(lambda options: Loader())]
