"""The two files of a batch: requests in OpenAI's batch format, and answers, which survive a kill."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any, Self

import msgspec

from engine.errors import EngineError, ResourceError


class BatchError(EngineError):
    """The batch can't be run, or not to its end; what was answered is kept."""


class Line(msgspec.Struct, frozen=True, kw_only=True):
    """One request of a batch file."""

    custom_id: str
    method: str = "POST"
    url: str = ""
    body: dict[str, Any] | None = None


class Written(msgspec.Struct, frozen=True):
    """What is read of a line of answers."""

    custom_id: str


def read_ids(path: Path) -> set[str]:
    """The ids of all requests of a batch file.

    Raises:
        BatchError: a line is no request, or two have the same id; nothing of such a file is run.
        ResourceError: the file can't be read.
    """
    found: set[str] = set()
    for number, line in read_lines(path):
        if line.custom_id in found:
            raise BatchError(f"{path}:{number}: the custom_id {line.custom_id!r} stands there a second time")
        found.add(line.custom_id)
    return found


def read_lines(path: Path) -> Iterator[tuple[int, Line]]:
    """The requests with the numbers of their lines."""
    decode = msgspec.json.Decoder(Line).decode
    try:
        with path.open("rb") as file:
            for number, raw in enumerate(file, 1):
                if raw.strip():
                    yield number, decode(raw)
    except OSError as error:
        raise ResourceError(f"the batch {path} can't be read: {error.strerror}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise BatchError(f"{path}:{number}: not a request of a batch: {error}") from None


class Answers:
    """The file of answers, open for more. One process at a time may hold it."""

    def __init__(self, path: Path) -> None:
        try:
            self._file: IO[bytes] = path.open("a+b")
        except OSError as error:
            raise ResourceError(f"the answers {path} can't be written: {error.strerror}") from None
        self._path = path

    def __enter__(self) -> Self:
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            self._file.close()
            raise BatchError(f"another process is writing {self._path}; wait for it or take another file") from None
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()

    def read_ids(self) -> set[str]:
        """The ids that have an answer; a line that a kill cut short is removed.

        Raises:
            BatchError: the file holds something else.
        """
        decode = msgspec.json.Decoder(Written).decode
        found, end = set(), 0
        self._file.seek(0)
        for number, raw in enumerate(self._file, 1):
            if not raw.endswith(b"\n"):
                self._file.truncate(end)
                break
            try:
                found.add(decode(raw).custom_id)
            except (msgspec.MsgspecError, UnicodeDecodeError):
                raise BatchError(f"{self._path}:{number}: not an answer of a batch; name another file") from None
            end += len(raw)
        return found

    def add(self, answer: dict[str, Any]) -> None:
        """Write one answer; it is in the file when this returns."""
        self._file.write(msgspec.json.encode(answer) + b"\n")
        self._file.flush()


__all__ = ["Answers", "BatchError", "Line", "read_ids", "read_lines"]
