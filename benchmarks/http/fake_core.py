"""An engine core for measurements: every step takes the same time and gives each request one token.

    python fake_core.py FD INTERVAL

Speaks the protocol of `engine.process` on the inherited socket. Tokens repeat a fixed list of ordinary words.
"""

from __future__ import annotations

import queue
import socket
import sys
import threading
import time
from typing import Any

import msgspec

from engine.messages import Abort, Add, Control, FinishReason, Output, Outputs, Phase, Ready, Reply, ToCore
from engine.wire import frame, receive

TOKENS = list(range(1000, 1064))


class FakeCore:
    """Answers on one socket, a step every `interval` seconds while there are requests."""

    def __init__(self, sock: socket.socket, interval: float) -> None:
        self._sock, self._interval = sock, interval
        self._inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._made: dict[str, int] = {}  # tokens of each request
        self._most: dict[str, int] = {}

    def run(self) -> None:
        """Until the other side is gone."""
        threading.Thread(target=self._read, daemon=True).start()
        self._send(Phase("ready", 1.0))
        self._send(Ready(32768, 65536, 16, 512, 512, {}))
        due = time.monotonic()
        while True:
            due = max(due + self._interval, time.monotonic())
            while (left := due - time.monotonic()) > 0 or not self._most:
                try:
                    message = self._inbox.get(timeout=max(0.0, left) if self._most else None)
                except queue.Empty:
                    break
                if not self._take(message):
                    return
                due = due if self._most else time.monotonic() + self._interval
            if self._most:
                self._send(Outputs([self._token(name) for name in list(self._most)], len(self._most), 0))

    def _read(self) -> None:
        decoder = msgspec.msgpack.Decoder(ToCore)
        while (message := receive(self._sock, decoder)) is not None:
            self._inbox.put(message)
        self._inbox.put(None)

    def _take(self, message: Any) -> bool:
        match message:
            case None | Control(verb="shutdown"):
                return False
            case Add():
                self._made[message.request_id], self._most[message.request_id] = 0, message.params.max_tokens or 1
            case Abort(names):
                for name in names:
                    self._most.pop(name, None)
            case Control(number, _, _):
                self._send(Reply(number, {}))
        return True

    def _token(self, name: str) -> Output:
        self._made[name] = made = self._made[name] + 1
        last = made == self._most[name]
        if last:
            del self._most[name]
        reason = FinishReason.LENGTH if last else None
        return Output(name, token_ids=[TOKENS[made % len(TOKENS)]], finish_reason=reason)

    def _send(self, message: msgspec.Struct) -> None:
        self._sock.sendall(frame(message))


if __name__ == "__main__":
    with socket.socket(fileno=int(sys.argv[1])) as sock:
        FakeCore(sock, float(sys.argv[2])).run()
