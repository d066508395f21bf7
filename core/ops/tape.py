"""A recorded run of CPU kernels that one native call repeats: the threads stay awake from the first kernel to the last,
and no Python runs between them.

    tape = record(lambda: model.forward(tokens, positions, step), memory, threads)
    …  write the next step's inputs into the tensors that it read
    tape.replay(plan.record)        the tensors that it returned are filled anew

What a tape repeats has the same sizes and addresses as when it was recorded; only what stands there may differ, and the
plan of the attention. So a run can be taped if it does nothing but call kernels of `engine.ops.native`, make tensors,
look at them from other sides, copy them and look up rows. Whoever does more is run as ever, and no tape comes of it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, Final, Generic, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from engine.ops import _native
from engine.ops.arena import Arena

T = TypeVar("T")

_LEAST: Final = 1024
"""Bytes of the smallest piece of memory."""


class TapeMemory:
    """Memory for what tapes write between their inputs and their results. Tapes that never run at once may share it.

    A piece is free again when no tensor looks at it any more: what a run drops is written over by its own later calls,
    in the same order whenever they are repeated.
    """

    def __init__(self) -> None:
        self._arena = Arena()
        self._free: dict[int, list[Tensor]] = {}

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
        """A tensor with anything in it."""
        size = prod(shape) * dtype.itemsize
        room = max(_LEAST, 1 << (size - 1).bit_length()) if size else _LEAST
        free = self._free.setdefault(room, [])
        piece = free.pop() if free else self._arena.take(room)
        seen = piece.numpy()[:size]
        weakref.finalize(seen, free.append, piece).atexit = False
        return torch.from_numpy(seen).view(dtype).view(shape)


@dataclass(frozen=True, slots=True)
class Tape(Generic[T]):
    """Kernel calls, and what they fill."""

    ops: bytes
    result: T
    threads: int

    def replay(self, plan: bytes) -> None:
        """Run the calls again, with attention as `plan` says (`AttentionPlan.record`)."""
        _native.replay(self.ops, plan, self.threads)


class _Recorder(TorchDispatchMode):
    """Sees what a run asks of torch: serves it so that it can be repeated, or notes that it can't."""

    def __init__(self, memory: TapeMemory) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._memory = memory
        self.foreign: str | None = None  # the first operation that a tape can't hold

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        options = kwargs or {}
        if func is torch.ops.aten.empty.memory_format and set(options) <= {"dtype", "device", "pin_memory"}:
            return self._memory.take(args[0], options.get("dtype") or torch.get_default_dtype())
        if func is torch.ops.aten.clone.default and args[0].is_contiguous():
            return self._copy(args[0])
        if func is torch.ops.aten.index.Tensor and _looks_up_rows(*args):
            return self._rows(args[0], args[1][0])
        result = func(*args, **options)
        if func._schema.is_mutable or not _is_view(result, args):
            self.foreign = self.foreign or str(func)
        return result

    def _copy(self, source: Tensor) -> Tensor:
        """As a table with one row, whose number is 0."""
        made = self._memory.take(source.shape, source.dtype)
        _native.gather(source.data_ptr(), _ZERO.data_ptr(), made.data_ptr(), 1, source.nbytes)
        return made

    def _rows(self, table: Tensor, ids: Tensor) -> Tensor:
        made = self._memory.take((len(ids), *table.shape[1:]), table.dtype)
        size = table.stride(0) * table.itemsize
        _native.gather(table.data_ptr(), ids.data_ptr(), made.data_ptr(), len(ids), size)
        return made


_ZERO: Final = torch.zeros(1, dtype=torch.int64)


def _looks_up_rows(table: Tensor, indices: Sequence[Tensor | None]) -> bool:
    ids = indices[0] if len(indices) == 1 else None
    return ids is not None and ids.dtype is torch.int64 and ids.dim() == 1 and table.is_contiguous()


def _is_view(result: Any, args: Sequence[Any]) -> bool:
    """Whether all that came out lies where something lay that went in."""
    places = {a.untyped_storage().data_ptr() for a in args if isinstance(a, Tensor)}
    made = result if isinstance(result, (list, tuple)) else (result,)
    return all(isinstance(t, Tensor) and t.untyped_storage().data_ptr() in places for t in made)


def record(run: Callable[[], T], memory: TapeMemory, threads: int) -> tuple[T, Tape[T] | None]:
    """Run something once: what it returned, and a tape of it unless it did more than a tape can hold.

    `run` is on the calling thread and under `torch.inference_mode`. Each replay fills the tensors of its result anew;
    their memory is kept from other tapes for as long as they live.
    """
    recorder = _Recorder(memory)
    _native.record()
    try:
        with recorder:
            result = run()
    finally:
        ops = _native.recorded()
    return result, Tape(ops, result, threads) if recorder.foreign is None else None


__all__ = ["Tape", "TapeMemory", "record"]
