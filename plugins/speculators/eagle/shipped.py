"""Heads that come with this package, in `heads/`, and the models they were trained for."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from engine.checkpoint import read_json
from engine.specs.model import ModelProfile

HEADS: Final = Path(__file__).parent / "heads"
"""One folder per head. Its `config.json` names the model it was trained for under `trained_for`."""


def shipped_head(profile: ModelProfile, heads: Path = HEADS) -> Path:
    """The folder of the head for a model: `trained_for` has its architecture, layers, hidden size and vocabulary.

    Raises:
        ValueError: there is none.
    """
    model = {
        "architecture": profile.architecture,
        "layers": profile.layers,
        "hidden_size": profile.hidden_size,
        "vocab_size": profile.vocab_size,
    }
    for config in sorted(heads.glob("*/config.json")):
        if read_json(config).get("trained_for") == model:
            return config.parent
    raise ValueError(
        f"no draft head for this model ({profile.architecture}, {profile.layers} layers of {profile.hidden_size}) "
        "comes with the engine; name a folder as speculator.options.head: path:FOLDER, or train one with "
        "`engine train eagle`"
    )


__all__ = ["HEADS", "shipped_head"]
