"""Whether the core gets on: it answers, and steps while requests wait for one."""

from __future__ import annotations


class Liveness:
    """Judges from one probe to the next, so that nothing runs while nobody asks.

    Args:
        patience: seconds without a sign of life after which the core counts as stuck.
    """

    def __init__(self, patience: float) -> None:
        self._patience = patience
        self._steps: int | None = None
        self._since: float | None = None  # when it was first seen not to get on

    def complaint(self, steps: int | None, pending: int, now: float) -> str | None:
        """What is wrong, in one sentence; None while it lives.

        Args:
            steps: how many the core has done; None when it doesn't answer.
            pending: requests in the core.
            now: monotonic seconds.
        """
        moving = steps is not None and (not pending or steps != self._steps)
        if moving or self._since is None:
            self._since = None if moving and not pending else now
        self._steps = self._steps if steps is None else steps
        if self._since is None or now - self._since < self._patience:
            return None
        what = "does not answer" if steps is None else f"has done no step while {pending} requests wait"
        return f"for {now - self._since:.0f} s the engine core {what}"


__all__ = ["Liveness"]
