"""Where the server listens: a TCP port or a Unix socket, with or without TLS. Imports no web framework."""

from __future__ import annotations

import contextlib
import errno
import os
import socket
import ssl
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Final

from engine.config.model import ListenSection
from engine.errors import ConfigError, ResourceError

_BACKLOG: Final = 2048


@contextmanager
def listen(section: ListenSection) -> Iterator[socket.socket]:
    """The listening socket that the configuration asks for; a Unix socket's file goes with it.

    Raises:
        ConfigError: only one half of `server.tls` is given.
        ResourceError: the address can't be had, or certificate and key can't be read; the sentence says why.
    """
    _check_tls(section)
    if section.uds is None:
        with bind(section.host, section.port) as sock:
            yield sock
        return
    path = Path(section.uds)
    with bind_path(path) as sock:
        try:
            yield sock
        finally:
            path.unlink(missing_ok=True)


def bind(host: str, port: int) -> socket.socket:
    """A listening socket: clients that come before the server is up wait instead of being turned away.

    Raises:
        ResourceError: the address can't be had; the sentence says why.
    """
    try:
        # The protocol is given and not 0, or else asyncio would leave Nagle's algorithm on: 40 ms for every answer.
        family, kind, proto, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        sock = socket.socket(family, kind, proto)
    except OSError as error:
        raise ResourceError(f"the address {host!r} of server.host can't be used: {error}") from None
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ResourceError(_bind_failure(error, host, port)) from None
    return sock


def bind_path(path: Path) -> socket.socket:
    """A listening Unix socket. One that a server left behind when it was killed is replaced.

    Raises:
        ResourceError: somebody listens there, or the path can't be had.
    """
    _remove_stale(path)
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(os.fspath(path))
        sock.listen(_BACKLOG)
    except OSError as error:
        sock.close()
        raise ResourceError(f"the Unix socket {path} of server.uds can't be bound: {error.strerror or error}") from None
    return sock


def shown(sock: socket.socket, tls: bool) -> str:
    """The address as people write it."""
    scheme = "https" if tls else "http"
    if sock.family == socket.AF_UNIX:
        return f"{scheme}+unix://{sock.getsockname()}"
    host, port = sock.getsockname()[:2]
    return f"{scheme}://[{host}]:{port}" if ":" in host else f"{scheme}://{host}:{port}"


def _remove_stale(path: Path) -> None:
    with contextlib.suppress(OSError):
        if not stat.S_ISSOCK(path.stat().st_mode):
            return  # binding will say that the path is taken
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
            try:
                probe.connect(os.fspath(path))
            except ConnectionRefusedError:
                path.unlink()
                return
        raise ResourceError(f"a server listens on {path} of server.uds already; stop it or take another path")


def _check_tls(section: ListenSection) -> None:
    cert, key = section.tls.cert, section.tls.key
    if (cert is None) != (key is None):
        raise ConfigError("server.tls needs both cert and key; give the other one too")
    if cert is None:
        return
    try:
        ssl.create_default_context(ssl.Purpose.CLIENT_AUTH).load_cert_chain(cert, key)
    except (OSError, ssl.SSLError) as error:
        raise ResourceError(f"server.tls: {cert} and {key} can't be used as certificate and key: {error}") from None


def _bind_failure(error: OSError, host: str, port: int) -> str:
    where = f"port {port} on {host}"
    if error.errno == errno.EADDRINUSE:
        return f"{where} is in use by another program; stop that one or take another port (--port 0 takes a free one)"
    if error.errno == errno.EACCES:
        return f"{where} may not be bound by this user; take a port of 1024 or above"
    return f"{where} can't be bound: {error.strerror}"


__all__ = ["bind", "bind_path", "listen", "shown"]
