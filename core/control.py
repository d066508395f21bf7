"""What the HTTP process may ask of the core beside requests: one verb, one answer of JSON values."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from engine.engine import Engine


def answer(engine: Engine, verb: str, arguments: Mapping[str, Any]) -> dict[str, Any]:
    """Do what the verb says, between two steps.

    `stats` has the counters, `speculation` those of drafts with the latest decisions about them. `reset_cache` forgets
    every cached prefix that no request uses, `log_level` sets the least severe message that is written. `release_kv`
    frees what was published with these `params`. `trace` with `on` starts a trace, without it ends one and has its
    spans. An unknown verb is answered with an error.
    """
    match verb:
        case "stats":
            return engine.stats()
        case "speculation":
            drafter = engine.drafter
            return {**drafter.stats(), "turns": drafter.lengths.turns()} if drafter is not None else {}
        case "reset_cache":
            return {"pages": engine.scheduler.cache.reset()}
        case "release_kv":
            return {"released": engine.handover.release(dict(arguments["params"]))}
        case "trace":
            if arguments["on"]:
                engine.tracer.start()
                return {"on": True}
            return {"spans": engine.tracer.stop()}
        case "log_level":
            level = str(arguments["level"])
            logging.getLogger("engine").setLevel(level.upper())
            return {"level": level}
        case _:
            return {"error": f"unknown verb {verb!r}"}


__all__ = ["answer"]
