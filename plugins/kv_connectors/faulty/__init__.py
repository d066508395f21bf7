"""Fault injection around any KV connector: lost, late, doubled and damaged transfers, and crashes. For tests."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from pydantic import Field

from engine.faults import When
from engine.hooks import hookimpl
from engine.plugin import Offer, WrapperOptions

if TYPE_CHECKING:
    from engine.specs.kv_connector import KVConnector, KVSchema, Role


class TransferFault(When):
    """One line of the script. An occasion is a publication or a fetch, as `at` says."""

    kind: Literal["drop", "delay", "corrupt", "duplicate", "raise", "kill"] = Field(
        description="drop: a fetch never begins, a publication's news never comes; delay: its news comes late; "
        "corrupt: a bit of the published pages is flipped until the publication ends; duplicate: the last news is "
        "told twice; "
        "raise refuses it; kill ends the process."
    )
    at: Literal["publish", "fetch"] = Field("fetch", description="What goes wrong: this end's publications or fetches.")
    seconds: float = Field(0.1, gt=0, description="How late delay is; when, after publishing, corrupt strikes.")


class FaultyOptions(WrapperOptions):
    """What is wrapped, and what goes wrong with it."""

    faults: list[TransferFault] = Field(default_factory=list, description="The script; several may strike at once.")


def build(options: FaultyOptions, *, inner: KVConnector, role: Role, schema: KVSchema, engine_id: str) -> KVConnector:
    """Wrap `inner`; raises ValueError for a fault that makes no sense at its place."""
    from engine.plugins.kv_connectors.faulty.connector import FaultyConnector

    return FaultyConnector(inner, options.faults)


@hookimpl
def kv_connectors() -> list[Offer[KVConnector]]:
    """The wrapper."""
    return [
        Offer(
            name="faulty",
            summary="another KV connector with faults injected (drop, delay, corrupt, duplicate, crash), for tests",
            build=build,
            options=FaultyOptions,
            wraps=True,
        )
    ]
