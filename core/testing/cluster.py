"""Servers as processes, for tests of what happens between them: a tiny model that any of them can serve, and the
commands `engine serve` and `engine route` on ports that stay theirs over all their lives.
"""

from __future__ import annotations

import http.client
import json
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final

from engine.testing.tokenizer import save_byte_tokenizer

_PROGRAM: Final = (sys.executable, "-c", "from engine.server.cli.main import main; main()")
_TICK: Final = 0.05

_TINY: Final = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 258,
    "max_position_embeddings": 1024,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 257,
}


def tiny_engine(folder: Path, **more: Any) -> Path:
    """Write a model with random weights, the same in every process, and the YAML of an engine that serves it.

    Args:
        more: sections of the YAML, laid over what is set for speed.
    """
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(_TINY))
    save_byte_tokenizer(model)
    sections: Mapping[str, Any] = {
        "model": {"source": f"path:{model}", "name": "tiny", "loader": "dummy", "dtype": "float32"},
        "device": {"threads": 1},
        "kv_cache": {"page_size": 8, "pages": 1200},
        "scheduler": {"max_running": 16, "max_waiting": 256},
        "grammar": "none",
        "logging": {"level": "error"},
        **more,
    }
    path = folder / "engine.yaml"
    path.write_text(json.dumps(sections))
    return path


class ServerProcess:
    """One command of ours that serves HTTP. Not started at first.

    Args:
        arguments: of `engine`, without the port.
    """

    def __init__(self, *arguments: str | Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._command: Sequence[str] = [*_PROGRAM, *map(str, arguments), "--port", str(self.port)]
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Begin a life; returns before it is ready."""
        assert self._process is None, "it runs already"
        self._process = subprocess.Popen(self._command, stdout=subprocess.DEVNULL, stdin=subprocess.DEVNULL)

    def ready(self) -> bool:
        """Whether it takes requests."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=5)
        try:
            connection.request("GET", "/health/ready")
            return connection.getresponse().status == 200
        except (OSError, http.client.HTTPException):
            return False
        finally:
            connection.close()

    def wait_ready(self, patience: float = 120.0) -> None:
        """Block until it takes requests; `patience` is in seconds.

        Raises:
            AssertionError: it ended by itself, or was never ready.
        """
        end = time.monotonic() + patience
        while not self.ready():
            assert self._process is not None, "it was never started"
            assert self._process.poll() is None, f"{self._command[3:]} ended by itself"
            assert time.monotonic() < end, f"{self._command[3:]} was not ready within {patience:g} s"
            time.sleep(_TICK)

    def end(self, how: signal.Signals = signal.SIGKILL) -> int | None:
        """End this life; returns the exit code, or None if there was none."""
        process, self._process = self._process, None
        if process is None:
            return None
        process.send_signal(how)
        return process.wait(60)


def free_port() -> int:
    """A TCP port of this machine that nobody listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


__all__ = ["ServerProcess", "free_port", "tiny_engine"]
