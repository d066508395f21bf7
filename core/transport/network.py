"""How two ends meet over TCP: where a producer listens, and whom a consumer may ask."""

from __future__ import annotations

import errno
import ipaddress
import os
import socket

from engine.transport.channel import TO_CONSUMER, TO_PRODUCER, Channel
from engine.transport.greeting import GreetedChannel
from engine.transport.options import NetworkOptions
from engine.transport.wire import Pool, Transport

Network = ipaddress.IPv4Network | ipaddress.IPv6Network
Address = ipaddress.IPv4Address | ipaddress.IPv6Address


class NetworkTransport(Transport[Pool]):
    """The meeting; subclasses add the moving."""

    keeps = True

    def __init__(self, name: str, options: NetworkOptions) -> None:
        self.name, self._options = name, options
        self._secret = options.secret.get_secret_value()
        self._peers: list[Network] = [ipaddress.ip_network(network) for network in options.peers]

    def listen(self) -> tuple[socket.socket, str]:
        """See `Transport.listen`."""
        family = _family(ipaddress.ip_address(self._options.host))
        listener = socket.socket(family, socket.SOCK_STREAM | socket.SOCK_CLOEXEC)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind((self._options.host, self._options.port))
        except OSError as error:
            listener.close()
            raise ValueError(
                f"the {self.name} KV connector can't listen at {self._options.host} port {self._options.port}: "
                f"{error.strerror}"
            ) from error
        host = ipaddress.ip_address(self._options.advertise or self._options.host)
        port = listener.getsockname()[1]
        return listener, f"[{host}]:{port}" if host.version == 6 else f"{host}:{port}"

    def check_address(self, address: str) -> None:
        """See `Transport.check_address`."""
        host, _ = _parse(address)
        if not any(host in network for network in self._peers):
            raise ValueError(
                f"the producer {address} is in none of the networks {', '.join(self._options.peers)}; "
                f"set the option peers of the {self.name} KV connector if it may be asked"
            )

    def dial(self, address: str) -> Channel:
        """See `Transport.dial`."""
        host, port = _parse(address)
        sock = socket.socket(_family(host), socket.SOCK_STREAM | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
        try:
            _prepare(sock)
            if (code := sock.connect_ex((str(host), port))) not in (0, errno.EINPROGRESS):
                raise OSError(code, os.strerror(code))
            if sock.getsockname()[:2] == (str(host), port):  # nobody there, and the port chosen at random met itself
                raise ConnectionRefusedError(errno.ECONNREFUSED, os.strerror(errno.ECONNREFUSED))
        except OSError:
            sock.close()
            raise
        return GreetedChannel(sock, *TO_PRODUCER, secret=self._secret, serves=False)

    def admit(self, sock: socket.socket) -> Channel:
        """See `Transport.admit`."""
        _prepare(sock)
        return GreetedChannel(sock, *TO_CONSUMER, secret=self._secret, serves=True)


def _prepare(sock: socket.socket) -> None:
    """Short messages go out at once, and a host that vanished is noticed in the end."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)


def _family(host: Address) -> socket.AddressFamily:
    return socket.AF_INET6 if host.version == 6 else socket.AF_INET


def _parse(address: str) -> tuple[Address, int]:
    """The parts of `1.2.3.4:5` or `[::1]:5`; raises ValueError for anything else."""
    host, _, port = address.rpartition(":")
    try:
        if not (port.isascii() and port.isdigit() and 0 < int(port) < 65536):
            raise ValueError(f"{port!r} is no port")
        return ipaddress.ip_address(host[1:-1] if host.startswith("[") and host.endswith("]") else host), int(port)
    except ValueError as error:
        raise ValueError(f"{address!r} is no address of a KV producer: {error}") from error


__all__ = ["NetworkTransport"]
