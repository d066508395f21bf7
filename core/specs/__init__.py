"""Extension points, one module each: the data passed, the abstract class that plugins subclass, the collecting hook.

Hooks run while an engine is composed. What an offer builds is called directly afterwards; no hook runs on the step.
"""

from __future__ import annotations

from engine.specs import (
    attention,
    cli_command,
    executor,
    grammar,
    kv_cache,
    kv_connector,
    model,
    model_source,
    observer,
    quantization,
    rate_limit,
    reasoning_parser,
    scheduling,
    server_route,
    speculator,
    tool_parser,
    weight_loader,
)

POINTS = (
    attention,
    kv_cache,
    kv_connector,
    speculator,
    model,
    model_source,
    weight_loader,
    quantization,
    executor,
    scheduling,
    grammar,
    reasoning_parser,
    tool_parser,
    observer,
    cli_command,
    server_route,
    rate_limit,
)
"""Every spec module. Each has `API` (the number of its contract), `HOOK` (the hook's name) and `BUILDS` (the class of
what an offer builds, where the core knows it); one whose offers must be of a subclass of `Offer` names it in `OFFER`.
"""

__all__ = ["POINTS", *(m.__name__.rsplit(".", 1)[-1] for m in POINTS)]
