"""The socket connector as seen from the network: addresses, secrets, strangers, and consumers that stop reading."""

from __future__ import annotations

import json
import signal
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from dataclasses import replace
from typing import Any

import pytest
from pydantic import ValidationError

from engine.plugins.kv_connectors import tcp
from engine.plugins.kv_connectors.tcp.transport import TcpTransport
from engine.specs.kv_connector import EventKind, KVSchema, Role
from engine.testing.kv_end import PATIENCE, SCHEMA, End, EndSpec, RemoteEnd
from engine.transport.options import NetworkOptions

SPEC = EndSpec(module=tcp.__name__, offer="tcp", options="{}", engine_id="engine-p")


@pytest.fixture
def make() -> Iterator[Callable[..., End]]:
    with ExitStack() as stack:

        def make(role: Role, schema: KVSchema = SCHEMA, **options: Any) -> End:
            end = End(replace(SPEC, role=role, schema=schema, options=json.dumps(options), engine_id=f"engine-{role}"))
            stack.callback(end.close)
            return end

        yield make


def call(handle: dict[str, Any]) -> socket.socket:
    host, port = handle["address"].rsplit(":", 1)
    return socket.create_connection((host.strip("[]"), int(port)), timeout=PATIENCE)


def test_listens_on_loopback_alone(make: Callable[..., End]) -> None:
    handle = make(Role.PRODUCER).publish("r", [1])
    assert handle["address"].startswith("127.0.0.1:")


def test_version_six(make: Callable[..., End]) -> None:
    try:
        producer = make(Role.PRODUCER, host="::1")
    except ValueError as error:
        pytest.skip(f"no IPv6 here: {error}")
    handle = producer.publish("r", [1, 2])
    assert handle["address"].startswith("[::1]:")
    consumer = make(Role.CONSUMER)
    consumer.fetch("r", handle, [3, 4])
    assert consumer.fetched("r").kind is EventKind.FETCHED
    assert consumer.read([3, 4]) == producer.read([1, 2])


def test_a_taken_port_is_told(make: Callable[..., End]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ValueError, match=f"can't listen at 127.0.0.1 port {port}: Address already in use"):
            make(Role.PRODUCER, port=port)


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        ({"host": "localhost"}, "localhost"),
        ({"host": "0.0.0.0"}, "no address that a consumer can reach; set advertise"),
        ({"peers": ["10.0.0.1/8"]}, "host bits"),
        ({"port": 65536}, "65535"),
    ],
)
def test_options_without_sense_are_refused(options: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        NetworkOptions.model_validate(options)


def test_what_is_advertised_stands_in_the_handle(make: Callable[..., End]) -> None:
    handle = make(Role.PRODUCER, host="0.0.0.0", advertise="10.1.2.3").publish("r", [1])
    assert handle["address"].startswith("10.1.2.3:")


@pytest.mark.parametrize(
    "address", ["", "127.0.0.1", "127.0.0.1:0", "127.0.0.1:99999", "localhost:80", ":80", "::1:80x"]
)
def test_addresses_are_read_strictly(make: Callable[..., End], address: str) -> None:
    consumer = make(Role.CONSUMER)
    handle = make(Role.PRODUCER).publish("r", [1]) | {"address": address}
    with pytest.raises(ValueError, match="no address of a KV producer"):
        consumer.fetch("r", handle, [1])


def test_a_handle_can_not_make_the_engine_talk_to_anybody(make: Callable[..., End]) -> None:
    handle = make(Role.PRODUCER).publish("r", [1]) | {"address": "169.254.169.254:80"}
    with pytest.raises(ValueError, match=r"169\.254\.169\.254:80 is in none of the networks"):
        make(Role.CONSUMER).fetch("r", handle, [1])
    TcpTransport(NetworkOptions(peers=("169.254.0.0/16",))).check_address("169.254.169.254:80")


def test_with_the_secret_on_both_sides(make: Callable[..., End]) -> None:
    producer, consumer = make(Role.PRODUCER, secret="s3"), make(Role.CONSUMER, secret="s3")
    consumer.fetch("r", producer.publish("r", [1, 2]), [3, 4])
    assert consumer.fetched("r").kind is EventKind.FETCHED
    assert consumer.read([3, 4]) == producer.read([1, 2])


@pytest.mark.parametrize(("theirs", "ours", "told"), [("s3", "", "has a shared secret"), ("s3", "s4", "gone")])
def test_without_it_nothing_is_read(make: Callable[..., End], theirs: str, ours: str, told: str) -> None:
    producer, consumer = make(Role.PRODUCER, secret=theirs), make(Role.CONSUMER, secret=ours)
    consumer.fetch("r", producer.publish("r", [1, 2]), [3, 4])
    failure = consumer.fetched("r")
    assert failure.kind is EventKind.FETCH_FAILED
    assert told in failure.reason
    assert producer.take() == []


@pytest.mark.parametrize(
    "data", [b"GET / HTTP/1.1\r\n\r\n", b"\x16\x03\x01" * 90, struct.pack("<I", 2**31), b"\0" * 4096]
)
def test_port_scanners_are_hung_up_on_and_harm_nobody(make: Callable[..., End], data: bytes) -> None:
    producer, consumer = make(Role.PRODUCER), make(Role.CONSUMER)
    handle = producer.publish("r", [1, 2])
    with call(handle) as scanner:
        scanner.sendall(data)
        try:
            while scanner.recv(4096):
                pass
        except ConnectionResetError:
            pass  # closed with our bytes unread
    consumer.fetch("r", handle, [3, 4])
    assert consumer.fetched("r").kind is EventKind.FETCHED


def test_silent_callers_are_hung_up_on(make: Callable[..., End]) -> None:
    producer = make(Role.PRODUCER, peer_timeout=0.2)
    with call(producer.publish("r", [1])) as silent:
        while silent.recv(4096):
            pass


def test_a_large_fetch_to_a_consumer_that_stops_reading_ends_with_its_lease(make: Callable[..., End]) -> None:
    """The stream is stuck in the middle; withdrawing hangs up, and the consumer's fetch fails when it goes on."""
    large = replace(SCHEMA, num_pages=1024, page_size=64, parts=(("k", (64, 8, 128)),))
    producer = make(Role.PRODUCER, large)
    handle = producer.publish("r", list(range(1024)))
    victim = RemoteEnd(replace(SPEC, role=Role.CONSUMER, schema=large, engine_id="engine-v"))
    victim.call("fetch", "r", handle, list(range(1024)))
    producer.wait("r", EventKind.RENEWED)
    victim.signal(signal.SIGSTOP)
    producer.withdraw("r")
    victim.signal(signal.SIGCONT)
    failure = victim.call("fetched", "r")
    assert (failure.kind, bool(failure.reason), failure.corrupt) == (EventKind.FETCH_FAILED, True, False)
    victim.close()
