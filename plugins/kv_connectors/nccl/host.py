"""Links in host memory over gloo: the same conversation where there is no GPU, for tests and trials."""

from __future__ import annotations

import secrets
import shutil
import stat
import tempfile
import threading
from collections.abc import Callable
from concurrent.futures import Future
from datetime import timedelta
from pathlib import Path
from queue import SimpleQueue
from typing import TYPE_CHECKING, Any, Final

import torch
from torch.distributed import FileStore, ProcessGroupGloo  # type: ignore[attr-defined]

from engine.transport.blocks import Digests
from engine.transport.link import WINDOW, Landing, Link, LinkLost, Links

if TYPE_CHECKING:
    from torch import Tensor

JOIN_SECONDS: Final = 1.0
"""For a thread that waits for nobody."""

PREFIX: Final = "engine-kv-"
"""Of the folders where two ends meet."""


class GlooLinks(Links):
    """See `Links`. Two ends meet through a file that only this user can read."""

    def __init__(self, timeout: float) -> None:
        """`timeout`: seconds that one send or receive may take; whoever waits for it gives up no later."""
        self._timeout = timedelta(seconds=timeout)
        self._folders: list[Path] = []

    def invite(self) -> bytes:
        """See `Links.invite`."""
        self._folders.append(Path(tempfile.mkdtemp(prefix=PREFIX)))
        return str(self._folders[-1] / secrets.token_hex(8)).encode()

    def join(self, invitation: bytes, *, invited: bool) -> Link:
        """See `Links.join`."""
        path = Path(invitation.decode("utf-8", "replace"))
        known = path.parent.parent == Path(tempfile.gettempdir()) and path.parent.name.startswith(PREFIX)
        if not known or not path.parent.is_dir() or stat.S_IMODE(path.parent.stat().st_mode) != 0o700:
            raise LinkLost(f"{str(path)!r} is no place where two ends of this host meet")
        return GlooLink(path, int(invited), self._timeout)

    def close(self) -> None:
        """See `Links.close`."""
        for folder in self._folders:
            shutil.rmtree(folder, ignore_errors=True)


class GlooLink(Link):
    """See `Link`. Rank 0 is the end that invited. One thread does what gloo waits for, in order."""

    def __init__(self, path: Path, rank: int, timeout: timedelta) -> None:
        self._path, self._rank, self._timeout = path, rank, timeout
        self._work: SimpleQueue[tuple[Callable[[], None], Future[None]] | None] = SimpleQueue()
        self._pending: list[Future[None]] = []
        self._group: Any = None
        self._closed = False
        self._post(self._meet)
        self._thread = threading.Thread(target=self._run, name="kv-gloo", daemon=True)
        self._thread.start()

    @property
    def room(self) -> bool:
        """See `Link.room`."""
        return len(self._pending) < WINDOW

    def _post(self, work: Callable[[], None]) -> Future[None]:
        future: Future[None] = Future()
        self._pending.append(future)
        self._work.put((work, future))
        return future

    def _run(self) -> None:
        while (item := self._work.get()) is not None and not self._closed:
            work, future = item
            try:
                work()
                future.set_result(None)
            except Exception as error:  # whatever gloo raises is told by `pump`
                future.set_exception(error)
        self._group = None  # its threads end here; at the end of the process they would end it badly

    def _meet(self) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._timeout = self._timeout
        self._group = ProcessGroupGloo(FileStore(str(self._path), 2), self._rank, 2, options)

    def send(self, fill: Callable[[Tensor], None], num_bytes: int) -> None:
        """See `Link.send`."""
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        fill(buffer)
        self._post(lambda: self._group.send([buffer], 1 - self._rank, 0).wait(self._timeout))

    def receive(self, num_bytes: int) -> Landing:
        """See `Link.receive`."""
        buffer = torch.empty(num_bytes, dtype=torch.uint8)
        return _GlooLanding(
            buffer, self._post(lambda: self._group.recv([buffer], 1 - self._rank, 0).wait(self._timeout))
        )

    def pump(self) -> bool:
        """See `Link.pump`."""
        if self._closed:
            raise LinkLost("the link is closed")
        done = [future for future in self._pending if future.done()]
        self._pending = [future for future in self._pending if not future.done()]
        for future in done:
            if (error := future.exception()) is not None:
                raise LinkLost(f"gloo: {error}")
        return bool(self._pending)

    def close(self) -> None:
        """See `Link.close`; what gloo waits for ends by its own deadline, and writes to memory of its own."""
        self._closed = True
        self._work.put(None)
        self._thread.join(JOIN_SECONDS)


class _GlooLanding(Landing):
    """See `Landing`."""

    def __init__(self, buffer: Tensor, future: Future[None]) -> None:
        self._buffer, self._future = buffer, future
        self._digests: Digests | None = None

    def arrived(self) -> bool:
        """See `Landing.arrived`."""
        return self._future.done() and self._future.exception() is None

    def take(self, scatter: Callable[[Tensor], Digests]) -> None:
        """See `Landing.take`."""
        self._digests = scatter(self._buffer)

    def taken(self) -> Digests | None:
        """See `Landing.taken`."""
        return self._digests

    def release(self) -> None:
        """See `Landing.release`: the bytes go nowhere."""


__all__ = ["GlooLink", "GlooLinks"]
