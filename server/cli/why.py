"""`engine why`: what the time of one request was made of."""

from __future__ import annotations

import asyncio
import json
from typing import Any, Final
from urllib.parse import quote

import click

from engine.server.cli.endpoint import Endpoint
from engine.server.cli.parameters import json_option
from engine.server.cli.table import table

_BAR: Final = 24
"""Characters of a bar that stands for the whole time."""

_SHORTEST: Final = 0.0005
"""Seconds below which a part is left out."""


@click.command("why")
@click.argument("request_id")
@click.option("--url", default="http://127.0.0.1:8000", show_default=True, help="The server that answered it.")
@click.option("--api-key", help="The key that sent it, or an administrator's.")
@json_option
def command(request_id: str, url: str, api_key: str | None, as_json: bool) -> None:
    """Say what the time of REQUEST_ID was made of.

    REQUEST_ID is the `x-request-id` of the answer's headers, or the `id` in the answer. The server knows its last
    finished requests (server.kept_requests).

    \b
    engine why chatcmpl-3f2a…
    engine why my-own-id --url http://10.0.0.5:8000 --api-key $KEY
    """
    found = asyncio.run(Endpoint(url, api_key).get(f"/requests/{quote(request_id, safe='')}"))
    click.echo(json.dumps(found, indent=2) if as_json else "\n".join(_lines(found)))


def _lines(found: dict[str, Any]) -> list[str]:
    total, first = found["total_seconds"], found["first_token_seconds"]
    answered = f"{found['path']} answered {found['status']} in {total:.3f} s"
    tokens = (
        f"{found['prompt_tokens']} prompt tokens ({found['cached_tokens']} cached), {found['output_tokens']} output"
    )
    longest = max(found["parts"], key=lambda part: part["seconds"])
    return [
        answered if first is None else f"{answered}, first token after {first:.3f} s",
        tokens if len(found["choices"]) == 1 else f"{tokens}; slowest of {len(found['choices'])} choices",
        "",
        table(
            ("PART", "TIME", "SHARE", "", "WHAT"),
            [_row(part, total) for part in found["parts"] if part["seconds"] >= _SHORTEST],
        ),
        "",
        f"Most of it was {longest['part']}: {longest['about']}.",
    ]


def _row(part: dict[str, Any], total: float) -> tuple[str, ...]:
    share = part["seconds"] / total if total else 0.0
    return part["part"], f"{part['seconds']:.3f} s", f"{share:4.0%}", "█" * round(_BAR * share), part["about"]


__all__ = ["command"]
