"""Which parser reads the answers of a model, and why."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import Any, cast

from engine.config.components import located, named, validated_options
from engine.config.model import EngineConfig
from engine.config.origins import Origins
from engine.registry import Owned, Registry
from engine.specs.reasoning_parser import ReasoningFormat, ReasoningParserOffer
from engine.specs.tool_parser import ModelText, ToolFormat, ToolParserOffer

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Picked:
    """What was taken for one of the two sections."""

    part: str  # `parsers.tools` or `parsers.reasoning`
    name: str  # of the offer, or none
    why: str
    distribution: str = ""
    refused: tuple[str, ...] = ()  # names that `auto` passed by: their formats aren't this model's


@dataclass(frozen=True, slots=True, kw_only=True)
class Parsers:
    """How the answers of one model are read."""

    tools: ToolFormat | None = None
    reasoning: ReasoningFormat | None = None
    picked: tuple[Picked, ...] = field(default=())


def choose_parsers(
    config: EngineConfig, registry: Registry, model: ModelText, origins: Origins | None = None
) -> Parsers:
    """The parsers that the configuration names, or those that recognize the model.

    Raises:
        ConfigError: a parser that is named isn't installed, or its options are wrong.
    """
    made: dict[str, Any] = {}
    picked = []
    for component in named(config):
        if component.key[0] != "parsers":
            continue
        kind = str(component.key[1])
        if component.absent:
            picked.append(Picked(part=f"parsers.{kind}", name="none", why="named in the configuration"))
        elif component.chosen:
            known = origins or Origins()
            offer = located(registry, component, known)
            owned = registry.get(component.point, component.use)
            made[kind] = owned.build(validated_options(offer, component.options, known, component.key))
            why = "named in the configuration"
            picked.append(Picked(part=f"parsers.{kind}", name=offer.name, why=why, distribution=owned.entry.owner))
        else:
            found, made[kind] = _recognized(f"parsers.{kind}", registry.offers(component.point), model)
            picked.append(found)
    return Parsers(
        tools=cast(ToolFormat | None, made.get("tools")),
        reasoning=cast(ReasoningFormat | None, made.get("reasoning")),
        picked=tuple(picked),
    )


def _recognized(part: str, offers: tuple[Owned[Any], ...], model: ModelText) -> tuple[Picked, Any]:
    """The highest in rank of those that know the model; nothing if none does."""
    passed: list[str] = []
    for owned in sorted(offers, key=lambda owned: -owned.offer.rank):
        why = _reason(owned, model)
        if why is not None:
            found = Picked(
                part=part, name=owned.offer.name, why=why, distribution=owned.entry.owner, refused=tuple(passed)
            )
            return found, owned.build(owned.offer.options())
        passed.append(owned.offer.name)
    why = "the chat template and the tokens of the model show no format that an installed parser knows"
    return Picked(part=part, name="none", why=why, refused=tuple(passed)), None


def _reason(owned: Owned[Any], model: ModelText) -> str | None:
    try:
        return cast(ToolParserOffer | ReasoningParserOffer, owned.offer).recognizes(model)
    except Exception as error:  # a stranger's code: it is passed by, and the log says why
        log.warning("the parser %s can't tell whether it fits: %s", owned.offer.name, error)
        return None


__all__ = ["Parsers", "Picked", "choose_parsers"]
