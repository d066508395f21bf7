"""Handing a request's KV from engine to engine, as clients say it: parameters, or for simple scripts a token.

`kv_transfer_params` has vLLM's fields. Instead of them a script may send `kv_transfer_action: export` to one engine,
and to another one `kv_transfer_action: import` with the `kv_transfer_token` that the first returned.
"""

from __future__ import annotations

import base64
import binascii
from typing import Any, Final

import msgspec

from engine.server.errors import bad_request
from engine.server.protocol import Generate

_MARK: Final = "kv1."
"""Begins every token, so that something else is recognised."""

_LONGEST: Final = 1 << 20
"""Characters of the longest token that is looked at."""


def transfer_params(body: Generate) -> dict[str, Any] | None:
    """What a request says of its KV, in the fields of `kv_transfer_params`; None if nothing.

    Raises:
        ApiError: 400, for an action that doesn't exist, or a token that no engine made.
    """
    if body.kv_transfer_action is None:
        if body.kv_transfer_token is not None:
            raise bad_request("kv_transfer_token needs kv_transfer_action: import", "kv_transfer_token")
        return body.kv_transfer_params
    if body.kv_transfer_params is not None:
        raise bad_request("send either kv_transfer_action or kv_transfer_params", "kv_transfer_action")
    match body.kv_transfer_action:
        case "export":
            if body.kv_transfer_token is not None:
                raise bad_request("kv_transfer_token is returned by an export, not sent to it", "kv_transfer_token")
            return {"do_remote_decode": True}
        case "import":
            return _params(body.kv_transfer_token)
        case other:
            raise bad_request(f"kv_transfer_action must be export or import, not {other[:64]!r}", "kv_transfer_action")


def handed_over(params: dict[str, Any] | None, action: str | None) -> dict[str, Any]:
    """The fields of an answer that say where its KV is; none if it isn't published."""
    if params is None:
        return {}
    token = {"kv_transfer_token": _token(params)} if action == "export" else {}
    return {"kv_transfer_params": params, **token}


def _token(params: dict[str, Any]) -> str:
    return _MARK + base64.urlsafe_b64encode(msgspec.json.encode(params)).decode().rstrip("=")


def _params(token: str | None) -> dict[str, Any]:
    if token is None:
        raise bad_request("kv_transfer_action: import needs the kv_transfer_token of an export", "kv_transfer_token")
    error = bad_request("kv_transfer_token is none that an export returned; pass it on unchanged", "kv_transfer_token")
    if not token.startswith(_MARK) or len(token) > _LONGEST:
        raise error
    text = token.removeprefix(_MARK)
    try:
        found = msgspec.json.decode(base64.b64decode(text + "=" * (-len(text) % 4), altchars=b"-_", validate=True))
    except (binascii.Error, ValueError, RecursionError):  # of msgspec and of characters beyond ASCII, too
        raise error from None
    if not isinstance(found, dict) or found.get("do_remote_prefill") is not True:
        raise error
    return found


__all__ = ["handed_over", "transfer_params"]
