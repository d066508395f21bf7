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
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final

import numpy as np

from engine.testing.tokenizer import save_byte_tokenizer

_PROGRAM: Final = (sys.executable, "-c", "from engine.server.cli.main import main; main()")
_TICK: Final = 0.05

_TINY: Final[dict[str, Any]] = {
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
    "tie_word_embeddings": False,
    "eos_token_id": 257,
}


def tiny_engine(folder: Path, **more: Any) -> Path:
    """Write a model with random weights and the YAML of an engine that serves it.

    The weights are large, so that every token of a prompt changes what follows.

    Args:
        more: sections of the YAML, laid over what is set for speed.
    """
    model = folder / "model"
    model.mkdir()
    (model / "config.json").write_text(json.dumps(_TINY))
    _save_weights(model / "model.safetensors")
    save_byte_tokenizer(model)
    sections: Mapping[str, Any] = {
        "model": {"source": f"path:{model}", "name": "tiny", "dtype": "float32"},
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


def _shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    width, inner, vocab = _TINY["hidden_size"], _TINY["intermediate_size"], _TINY["vocab_size"]
    yield "model.embed_tokens.weight", (vocab, width)
    yield "lm_head.weight", (vocab, width)
    yield "model.norm.weight", (width,)
    for layer in range(_TINY["num_hidden_layers"]):
        at = f"model.layers.{layer}"
        yield f"{at}.input_layernorm.weight", (width,)
        yield f"{at}.post_attention_layernorm.weight", (width,)
        for name, rows in (("q", width), ("k", width // 2), ("v", width // 2), ("o", width)):
            yield f"{at}.self_attn.{name}_proj.weight", (rows, width)
        yield f"{at}.mlp.gate_proj.weight", (inner, width)
        yield f"{at}.mlp.up_proj.weight", (inner, width)
        yield f"{at}.mlp.down_proj.weight", (width, inner)


def _save_weights(path: Path) -> None:
    """Write float32 tensors as safetensors: the length of a JSON header, the header, the data one after another."""
    draw, header, data = np.random.default_rng(7), dict[str, Any](), b""
    for name, shape in _shapes():
        values = draw.normal(1.0 if len(shape) == 1 else 0.0, 0.3, shape).astype("<f4").tobytes()
        header[name] = {"dtype": "F32", "shape": shape, "data_offsets": [len(data), len(data) + len(values)]}
        data += values
    text = json.dumps(header).encode()
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


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
