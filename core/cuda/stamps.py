"""Moments on a CUDA stream, on the clock of the host."""

from __future__ import annotations

import time

import torch


class CudaStamps:
    """Events; see `engine.trace.Stamps`. They tell the time to about half a microsecond."""

    def start(self) -> None:
        """Read both clocks at once, with the device idle."""
        torch.cuda.synchronize()
        self._reference = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        self._reference.record()
        self._reference.synchronize()
        self._began = time.monotonic()

    def stamp(self) -> torch.cuda.Event:
        """The moment at which the current stream gets here."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def seconds(self, stamp: torch.cuda.Event) -> float:
        """That moment, once it has come."""
        stamp.synchronize()
        return self._began + float(self._reference.elapsed_time(stamp)) / 1e3


__all__ = ["CudaStamps"]
