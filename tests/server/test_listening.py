"""TLS and Unix sockets, through a real server."""

from __future__ import annotations

import os
import socket
import ssl
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from engine.config.load import load_config
from engine.errors import ConfigError, ResourceError
from engine.server.listening import bind_path, listen, shown

TLS = Path(__file__).parents[1] / "data" / "tls"  # self-signed, for localhost and nothing else
PAIR = (f"server.tls.cert={TLS / 'cert.pem'}", f"server.tls.key={TLS / 'key.pem'}")


@contextmanager
def socket_of(*overrides: str) -> Iterator[socket.socket]:
    with listen(load_config(None, overrides).config.server) as sock:
        yield sock


@pytest.fixture
def short(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """A folder whose name fits into the 108 bytes of a socket's address."""
    folder = Path(f"/tmp/engine-test-{os.getpid()}")
    folder.mkdir()
    yield folder
    folder.rmdir()  # and nothing may be left in it


def test_https_with_certificate_and_key(serving: Any) -> None:
    live = serving(overrides=PAIR)
    base = live.base.replace("http://", "https://")
    context = ssl.create_default_context(cafile=str(TLS / "cert.pem"))
    with httpx.Client(base_url=base, verify=context, trust_env=False, timeout=20) as client:
        body = {"prompt": "abc", "max_tokens": 5}
        assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == "hello"
    with pytest.raises(httpx.HTTPError):
        live.http.get("/health")


@pytest.mark.parametrize("half", PAIR)
def test_half_of_tls_is_refused(half: str) -> None:
    with pytest.raises(ConfigError, match=r"server\.tls needs both cert and key"), socket_of(half):
        pass


def test_files_that_are_no_certificate_are_refused() -> None:
    swapped = (f"server.tls.cert={TLS / 'key.pem'}", f"server.tls.key={TLS / 'cert.pem'}")
    with pytest.raises(ResourceError, match=r"server\.tls: .*can't be used"), socket_of(*swapped):
        pass
    with pytest.raises(ResourceError, match="No such file"), socket_of(PAIR[0], "server.tls.key=/none.pem"):
        pass


def test_a_unix_socket_serves_and_goes_with_the_server(start_server: Any, short: Path) -> None:
    path = short / "s"
    with socket_of(f"server.uds={path}") as sock:
        assert shown(sock, tls=False) == f"http+unix://{path}"
        live = start_server()
        live.sock.close()
        live.sock = sock
        transport = httpx.HTTPTransport(uds=str(path))
        with live, httpx.Client(transport=transport, base_url="http://engine", timeout=20) as client:
            body = {"prompt": "abc", "max_tokens": 5}
            assert client.post("/v1/completions", json=body).json()["choices"][0]["text"] == "hello"
    assert not path.exists()


def test_a_socket_left_behind_is_replaced_but_not_one_in_use(short: Path) -> None:
    path = short / "s"
    bind_path(path).close()  # as a killed server leaves it
    assert path.exists()
    with socket_of(f"server.uds={path}"), pytest.raises(ResourceError, match=r"a server listens on .* already"):
        bind_path(path)
    path.write_text("a file of somebody's")
    with pytest.raises(ResourceError, match="can't be bound"):
        bind_path(path)
    assert path.read_text() == "a file of somebody's"
    path.unlink()


def test_addresses_as_people_write_them() -> None:
    with socket_of("server.port=0") as sock:
        assert shown(sock, tls=True) == f"https://127.0.0.1:{sock.getsockname()[1]}"
