"""The engine core process: `python -m engine.process FD`, a child of the HTTP process with one end of a socket pair.

It composes and builds the engine from the first message, reports each phase, then steps while there is work. When the
socket closes, the HTTP process is gone and this one ends too: there are no orphans.
"""

from __future__ import annotations

import gc
import logging
import os
import queue
import socket
import sys
import threading
from pathlib import Path
from typing import Any, Final

import msgspec

from engine import control, logs
from engine.errors import EngineError
from engine.messages import Abort, Add, Control, Failed, Output, Outputs, Phase, Ready, Reply, Start, ToCore
from engine.wire import frame, receive

log = logging.getLogger(__name__)

_SPIN: Final = "2000"
"""How often an idle OpenMP thread of this process looks for work before it sleeps. The default of some 300,000 burns
whole time slices when two processes share the cores: two engines then run at a fifth of their speed, with this number
at a third, and as fast as ever when alone."""

_SWITCH: Final = 0.0005
"""Seconds after which a thread must let another have the interpreter. The runner's thread packs a step in about a
millisecond; with Python's default it could wait five for the scheduler's first."""

_TRANSFER_TICK: Final = 0.05
"""Seconds between looks at the transfers while no step runs."""

Inbox = queue.SimpleQueue[Any]
"""Decoded messages; None means that the HTTP process is gone."""


class CoreProcess:
    """Drives one engine from one socket."""

    def __init__(self, sock: socket.socket) -> None:
        self._sock = sock
        self._inbox: Inbox = queue.SimpleQueue()
        self._building = True  # from the start: importing torch takes a while too
        self._load = 0, 0  # running and waiting requests, as last told

    def run(self) -> int:
        """Serve until told to stop or abandoned; returns the exit code."""
        threading.Thread(target=self._read, name="inbox", daemon=True).start()
        start = self._inbox.get()
        if not isinstance(start, Start):
            return 1
        try:
            self._serve(start)
        except EngineError as error:
            self._send(Failed(str(error)))
            return error.exit_code
        except BrokenPipeError:
            return 0
        except Exception as error:
            log.exception("the engine core failed")
            self._send(Failed(f"{type(error).__name__}: {error}"))
            return 1
        return 0

    def _read(self) -> None:
        decoder = msgspec.msgpack.Decoder(ToCore)
        while True:
            message = receive(self._sock, decoder)
            if self._building and (message is None or isinstance(message, Control)):
                os._exit(0)  # nothing is served yet, and loading can't be interrupted otherwise
            self._inbox.put(message)
            if message is None:
                return

    def _send(self, message: msgspec.Struct) -> None:
        self._sock.sendall(frame(message))

    def _phase(self, name: str, progress: float = 0.0, detail: str = "") -> None:
        self._send(Phase(name, progress, detail))

    def _serve(self, start: Start) -> None:
        from engine.assemble import assemble
        from engine.config.model import EngineConfig

        config = EngineConfig.model_validate(start.config)
        logs.configure(config.logging.level, config.logging.format, "core")
        built = assemble(config, Path(start.model_path), self._phase, wake=lambda: self._inbox.put(()))
        self._engine = built.engine
        self._building = False
        gc.collect()
        gc.freeze()  # what is left lives as long as the engine; looking through it would hold up a step for 0.1 s
        try:
            self._phase("ready", 1.0)
            self._send(
                Ready(
                    max_context=built.engine.max_context,
                    num_pages=built.num_pages,
                    page_size=built.page_size,
                    max_running=config.scheduler.max_running,
                    max_waiting=config.scheduler.max_waiting,
                    info=built.composition.as_dict(),
                )
            )
            self._loop()
        finally:
            built.engine.close()

    def _loop(self) -> None:
        engine = self._engine
        while self._take_messages():
            self._tell(engine.step())

    def _tell(self, outputs: list[Output]) -> None:
        """Send news of requests, or at least how many there are if that has changed (after an abort, say)."""
        load = len(self._engine.scheduler.running), len(self._engine.scheduler.waiting)
        if outputs or load != self._load:
            self._load = load
            with self._engine.tracer.span("engine", "send", 0):
                self._send(Outputs(outputs, *load))

    def _take_messages(self) -> bool:
        """Handle what has arrived, waiting for something if there is nothing to compute. False ends the process."""
        engine = self._engine
        timeout = _TRANSFER_TICK if engine.has_work or engine.handover.busy else None
        try:
            message = self._inbox.get(block=engine.idle, timeout=timeout)
            while True:
                if not self._handle(message):
                    return False
                message = self._inbox.get_nowait()
        except queue.Empty:
            return True

    def _handle(self, message: Any) -> bool:
        engine = self._engine
        match message:
            case None:
                return False
            case Add():
                if (refusal := engine.add(message)) is not None:
                    self._tell([refusal])
            case Abort(request_ids):
                engine.abort(request_ids)
            case Control(verb="shutdown"):
                return False
            case Control(number, verb, arguments):
                self._send(Reply(number, control.answer(engine, verb, arguments)))
        return True


def main() -> int:
    """Entry of the child process; the only argument is the number of the inherited socket."""
    sys.setswitchinterval(_SWITCH)
    os.environ.setdefault("GOMP_SPINCOUNT", _SPIN)  # read by the OpenMP runtime, which comes with torch
    logging.basicConfig(level="WARNING", format="%(asctime)s %(levelname).1s %(name)s: %(message)s", stream=sys.stderr)
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        return CoreProcess(sock).run()


if __name__ == "__main__":
    sys.exit(main())
