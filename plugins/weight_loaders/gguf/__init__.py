"""GGUF files, dequantized to dense tensors; tokenizer and chat template come from the file's metadata."""

from __future__ import annotations

from engine.hooks import hookimpl
from engine.plugin import Capabilities, Offer, Options
from engine.plugins.weight_loaders.gguf.names import ARCHITECTURES
from engine.specs.weight_loader import WeightLoader


def build(options: Options) -> WeightLoader:
    """The one loader."""
    from engine.plugins.weight_loaders.gguf.loader import GGUFLoader

    return GGUFLoader()


@hookimpl
def weight_loaders() -> list[Offer[WeightLoader]]:
    """The loader of GGUF files."""
    return [
        Offer(
            name="gguf",
            summary="one GGUF file, dequantized while it is read",
            build=build,
            capabilities=Capabilities(architectures=frozenset({*ARCHITECTURES.values(), "MistralForCausalLM"})),
        )
    ]
