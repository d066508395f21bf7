"""Errors in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import re

import msgspec
from starlette.responses import Response

_TYPES = {
    401: "authentication_error",
    403: "permission_error",
    404: "not_found_error",
    429: "rate_limit_error",
    500: "server_error",
    503: "service_unavailable_error",
}


_LONGEST = 500


class ApiError(Exception):
    """Ends a request with a status and one sentence for the client.

    Args:
        status: HTTP status, 4xx or 5xx.
        message: what was asked, what there is, what to do.
        param: the field that is at fault.
        code: a word for programs, such as `model_not_found`.
        retry_after: seconds after which the same request may succeed.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message if len(message) <= _LONGEST else f"{message[:_LONGEST]}…"  # clients' words are in it
        self.param = param
        self.code = code
        self.headers = {} if retry_after is None else {"Retry-After": str(retry_after)}

    def body(self) -> bytes:
        """The JSON text."""
        kind = _TYPES.get(self.status, "invalid_request_error")
        error = {"message": self.message, "type": kind, "param": self.param, "code": self.code}
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        """The whole answer."""
        return Response(self.body(), self.status, headers=self.headers, media_type="application/json")


def bad_request(message: str, param: str | None = None) -> ApiError:
    """A 400: the client asked for something that can't be."""
    return ApiError(400, message, param=param)


_NOUNS = {
    "str": "a string",
    "int": "an integer",
    "float": "a number",
    "bool": "true or false",
    "array": "a list",
    "object": "an object",
    "null": "null",
}
_MISMATCH = re.compile(r"Expected `(?P<want>[^`]+)`, got `(?P<got>[^`]+)`(?: - at `\$\.?(?P<path>[^`]*)`)?$")
_MISSING = re.compile(r"Object missing required field `(?P<field>[^`]+)`(?: - at `\$\.?(?P<path>[^`]*)`)?$")


def describe(error: msgspec.ValidationError) -> ApiError:
    """Turn a validation error of msgspec into a sentence about the client's field."""
    text = str(error)
    if found := _MISSING.match(text):
        path = f"{found['path']}.{found['field']}" if found["path"] else found["field"]
        return bad_request(f"{path} is required", path)
    if found := _MISMATCH.match(text):
        want = " or ".join(_NOUNS.get(t, t) for t in found["want"].split(" | ") if t != "null")
        got = _NOUNS.get(found["got"], found["got"])
        path = found["path"] or None
        return bad_request(f"{path or 'the body'} must be {want}, not {got}", path)
    return bad_request(f"the body has a bad value: {text[:1].lower()}{text[1:]}")


__all__ = ["ApiError", "bad_request", "describe"]
