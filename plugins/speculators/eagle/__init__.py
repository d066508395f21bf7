"""EAGLE heads: one small layer that drafts from the target's own hidden states."""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from engine.hooks import hookimpl
from engine.plugin import Capabilities, Flag, Needs, Offer, Options

if TYPE_CHECKING:
    import click

    from engine.specs.model import ModelProfile
    from engine.specs.speculator import ResidentSpeculator


class TreeOptions(Options):
    """How wide and deep a tree is grown before its best nodes are drafted."""

    top_k: int = Field(4, ge=2, le=32, description="Nodes of a level that have children, and children of each.")
    depth: int = Field(5, ge=2, le=16, description="Most draft tokens one after the other.")


class EagleOptions(Options):
    """Which head drafts, and in which form."""

    head: str | None = Field(
        None,
        description="The head's folder as path:FOLDER or package:NAME/FOLDER; if unset, the one that comes with the "
        "engine for this model.",
    )
    quantization: str | None = Field(
        None,
        description="Name of an installed quantization for the head's linear layers. If unset: int8 beside a model in "
        "bfloat16 on a CPU that multiplies integers, else the model's own.",
    )
    tree: TreeOptions | None = Field(
        None,
        description="Draft a tree of at most max_draft tokens; a chain if unset, or where trees can't be verified.",
    )


def build(options: EagleOptions, *, profile: ModelProfile, max_running: int) -> ResidentSpeculator:
    """Make the speculator; it learns of its target in `plan`."""
    from engine.plugins.speculators.eagle.resident import EagleSpeculator

    return EagleSpeculator(options)


@hookimpl
def speculators() -> list[Offer[ResidentSpeculator]]:
    """The one offer of this module."""
    return [
        Offer(
            name="eagle",
            summary="EAGLE, EAGLE-2, EAGLE-3 and EAGLE-3.1 heads: draft from the target's hidden states",
            build=build,
            options=EagleOptions,
            capabilities=Capabilities(flags=frozenset({Flag.TREE_DRAFTS, Flag.GRAPH_SAFE})),
            requires={"models": Needs(flags=frozenset({Flag.HIDDEN_STATES}))},
        )
    ]


def build_command(options: Options) -> click.Command:
    """The command `train`."""
    from engine.plugins.speculators.eagle.training.command import group

    return group


@hookimpl
def cli_commands() -> list[Offer[click.Command]]:
    """One command."""
    return [Offer(name="train", summary="Train a draft head for a model.", build=build_command)]


__all__ = ["EagleOptions", "TreeOptions", "build", "speculators"]
