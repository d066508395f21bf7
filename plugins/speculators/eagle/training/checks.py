"""What can be told of a configuration before the target writes text, which may take hours, and heads learn from it."""

from __future__ import annotations

from typing import Any

from engine.errors import ConfigError
from engine.plugins.speculators.eagle.files import weight_file
from engine.plugins.speculators.eagle.shape import read_shape
from engine.plugins.speculators.eagle.training.config import TrainConfig, head_config
from engine.plugins.speculators.eagle.training.evaluation import read_exercises
from engine.plugins.speculators.eagle.training.openings import read_texts
from engine.plugins.speculators.eagle.training.target import Target


def check(config: TrainConfig, target: Target) -> None:
    """Refuse what would end the run later.

    Raises:
        ConfigError: a head can't be of that shape, a row is longer than the target's context, or a file is missing.
    """
    if (longest := max(config.training.contexts)) > target.profile.max_context:
        raise ConfigError(
            f"training.contexts has {longest:,}, but the target's context is {target.profile.max_context:,} tokens"
        )
    for name, section in config.heads.items():
        described(config, target, name, min(config.draft_vocab, target.profile.vocab_size))
        if section.start is not None:
            try:
                weight_file(section.start)
            except ValueError as error:
                raise ConfigError(f"heads.{name}.start: {error}") from None
    if config.evaluation.prompts is not None:
        read_exercises(config.evaluation.prompts)
        read_texts("evaluation.filler", config.evaluation.filler)


def described(
    config: TrainConfig, target: Target, name: str, draft_vocab: int
) -> tuple[dict[str, Any], tuple[int, ...]]:
    """The `config.json` of a head, and the layers that it watches.

    Raises:
        ConfigError: no head can be like that.
    """
    made = head_config(
        config.heads[name],
        target.profile,
        target.composition.model_config,
        draft_vocab=draft_vocab,
        layers=config.layers,
    )
    try:
        return made, read_shape(made).hidden_layers(target.profile.layers)
    except ValueError as error:
        raise ConfigError(f"heads.{name}: {error}") from None


__all__ = ["check", "described"]
