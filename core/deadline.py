"""Code of strangers under a deadline: a call on a thread of its own that nobody waits for longer than agreed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import TypeVar

T = TypeVar("T")


class Overdue(Exception):
    """The call has not come back in time. Its thread is left behind; it is a daemon and ends with the process."""


def within(seconds: float, call: Callable[[], T]) -> T:
    """What `call` returns or raises, on another thread.

    Raises:
        Overdue: it takes longer than `seconds`.
    """
    results: list[T] = []
    errors: list[BaseException] = []

    def run() -> None:
        try:
            results.append(call())
        except BaseException as error:  # an interrupt or an exit is the caller's to handle, like everything else
            errors.append(error)

    thread = threading.Thread(target=run, name="under a deadline", daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise Overdue(f"did not come back within {seconds:g} s")
    if errors:
        raise errors[0]
    return results[0]


__all__ = ["Overdue", "within"]
