"""Decode steps captured as CUDA graphs, one per batch size of a ladder, in one memory pool."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Generic, TypeVar

import torch

Out = TypeVar("Out")


def ladder(most: int) -> list[int]:
    """Batch sizes worth a graph, ascending: dense where a step is short, so that padding stays under a quarter."""
    sizes = [1, 2, 4, *range(8, 64, 8), *range(64, 256, 16), *range(256, 1025, 64)]
    return [size for size in sizes if size < most] + [most]


class Graphs(Generic[Out]):
    """Captures and replays `step`.

    Args:
        step: computes the batch of so many decodes that lies in the static inputs, and returns what came out of it,
            in memory that the next call may overwrite.
        sizes: of batches, ascending.
        pool: memory of the graphs; those that never run at once may share it.
    """

    def __init__(self, step: Callable[[int], Out], sizes: list[int], pool: Any) -> None:
        self._step, self._pool = step, pool
        self._missing = list(sizes)  # the largest is captured first: the others then fit into its memory
        self._captured: dict[int, tuple[torch.cuda.CUDAGraph, Out]] = {}
        self._sizes: list[int] = []

    @property
    def next(self) -> int | None:
        """The batch size to be captured next; None when all are."""
        return self._missing[-1] if self._missing else None

    def capture_next(self) -> None:
        """Capture one more graph; nothing runs on the device.

        The step must have run with this size before, so that nothing is set up in the capture, and the current stream
        must not be the default one.
        """
        size = self._missing.pop()
        graph = torch.cuda.CUDAGraph()
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        try:
            out = self._step(size)
        finally:
            graph.capture_end()
        self._captured[size] = graph, out
        self._sizes = sorted(self._captured)

    def give_up(self) -> None:
        """Capture no more."""
        self._missing.clear()

    def size_for(self, rows: int) -> int | None:
        """The smallest captured batch that holds so many rows, if it is not too much larger."""
        found = next((size for size in self._sizes if size >= rows), None)
        return found if found is not None and (found <= 2 * rows or not self._missing) else None

    def replay(self, size: int) -> Out:
        """Run a captured step on what lies in the inputs now."""
        graph, out = self._captured[size]
        graph.replay()
        return out


__all__ = ["Graphs", "ladder"]
