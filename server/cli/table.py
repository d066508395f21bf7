"""Tables as plain text: columns aligned, nothing cut off, so that they can be searched and piped."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import click


def table(headers: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows under their headers; the last column is not padded."""
    cells = [list(headers), *(list(row) for row in rows)]
    widths = [max(len(row[i]) for row in cells) for i in range(len(headers))]
    lines = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([click.style(lines[0], bold=True), *lines[1:]])


__all__ = ["table"]
