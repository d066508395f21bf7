"""How both processes write their logs to stderr: lines for people, or one JSON object per line for machines."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Callable, Mapping
from datetime import UTC, datetime
from typing import Any, Final

_TEXT: Final = "%(asctime)s %(levelname).1s %(name)s: %(message)s"


class JsonFormatter(logging.Formatter):
    """time, level, logger, process, message; fields of the context and of the line; the traceback as `error`."""

    def __init__(self, process: str, context: Callable[[], Mapping[str, str]] = dict) -> None:
        super().__init__()
        self._process, self._context = process, context

    def format(self, record: logging.LogRecord) -> str:
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "process": self._process,
            "message": record.getMessage(),
            **self._context(),
            **getattr(record, "fields", {}),
        }
        if record.exc_info:
            line["error"] = self.formatException(record.exc_info)
        return json.dumps(line, ensure_ascii=False, default=str)


def configure(level: str, form: str, process: str, context: Callable[[], Mapping[str, str]] = dict) -> None:
    """Send the logs of this process to stderr.

    Args:
        level: least severe message of ours that is written; of other libraries, warnings are.
        form: text or json.
        process: what JSON lines call this process.
        context: further fields of a JSON line, asked for when it is written.
    """
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter(process, context) if form == "json" else logging.Formatter(_TEXT))
    logging.basicConfig(handlers=[handler], level="WARNING", force=True)
    logging.getLogger("engine").setLevel(level.upper())


__all__ = ["JsonFormatter", "configure"]
