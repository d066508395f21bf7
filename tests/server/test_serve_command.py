from __future__ import annotations

import socket
import subprocess
import sys

import pytest
from click.testing import CliRunner

from engine.config.model import EngineConfig
from engine.errors import ConfigError, ResourceError
from engine.server.cli.serve import bind, command


def test_the_http_process_imports_no_torch() -> None:
    modules = "server.cli.serve, server.app, server.lifecycle, server.metrics, server.state, model_tokenizer"
    imports = "; ".join(f"import engine.{module}" for module in modules.split(", "))
    code = f"import sys; {imports}; print(sorted({{'torch', 'transformers', 'triton'}} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_the_command_imports_no_web_framework_before_the_core_starts() -> None:
    code = "import sys, engine.server.cli.serve; print(sorted({'fastapi', 'starlette', 'uvicorn'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True).stdout == "[]\n"


def test_port_zero_takes_a_free_port_and_listens_at_once() -> None:
    with bind("127.0.0.1", 0) as sock:
        with socket.create_connection(sock.getsockname(), timeout=5) as client:
            assert client.getpeername() == sock.getsockname()
        assert sock.proto == socket.IPPROTO_TCP  # or else every answer would wait for Nagle's algorithm


def test_a_port_in_use_is_one_sentence() -> None:
    with bind("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        with pytest.raises(ResourceError, match=f"port {port} on 127.0.0.1 is in use by another program") as error:
            bind("127.0.0.1", port)
    assert error.value.exit_code == 3
    assert "\n" not in str(error.value)


def test_an_address_that_is_none_of_ours() -> None:
    with pytest.raises(ResourceError, match=r"server\.host"):
        bind("no such host", 0)
    with pytest.raises(ResourceError, match="can't be bound"):
        bind("192.0.2.1", 0)


def test_only_this_machine_by_default() -> None:
    assert EngineConfig().server.host == "127.0.0.1"


def test_options_are_overrides() -> None:
    result = CliRunner().invoke(command, ["--port", "70000"])
    assert isinstance(result.exception, ConfigError)
    assert "server.port" in str(result.exception)
    result = CliRunner().invoke(command, ["--set", "server.prot=1"])
    assert isinstance(result.exception, ConfigError)
    assert "did you mean" in str(result.exception)
