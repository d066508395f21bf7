"""One end of a KV connector with a pool around it, in this process or in another one, for the conformance suite.

Pools are filled from a seed, so that the other side of a process boundary knows what a page must hold.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import signal
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import import_module
from multiprocessing.connection import Connection
from typing import Any, Final

import torch
from torch import Tensor

from engine.plugin import Offer
from engine.specs.kv_connector import EventKind, KVConnector, KVSchema, Role, TransferEvent
from engine.testing.wrapping import around, inner_offer

PATIENCE: Final = 30.0
"""Seconds after which an event that has not come is a failure, unless the suite says otherwise."""

SCHEMA: Final = KVSchema(
    weights="toy",
    layers=3,
    page_size=4,
    parts=(("k", (4, 2, 6)), ("v", (4, 2, 5))),
    dtype="bfloat16",
    num_pages=64,
)
"""The schema the suite builds with: parts of different sizes, none of them a power of two."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EndSpec:
    """What makes an end; picklable."""

    module: str  # that declares the offer
    offer: str
    options: str  # JSON
    role: Role = Role.BOTH
    schema: KVSchema = SCHEMA
    engine_id: str = "engine-a"
    seed: int = 1
    patience: float = PATIENCE

    def find(self) -> Offer[KVConnector]:
        """The offer, from its module."""
        offers: list[Offer[KVConnector]] = import_module(self.module).kv_connectors()
        offer = next(offer for offer in offers if offer.name == self.offer)
        return around(offer, inner_offer("kv_connectors")) if offer.wraps else offer


class End:
    """A started connector, its pool, and the events it reported."""

    def __init__(self, spec: EndSpec) -> None:
        offer = spec.find()
        options = offer.options.model_validate(json.loads(spec.options))
        self.connector = offer.build(options, role=spec.role, schema=spec.schema, engine_id=spec.engine_id)
        self.spec = spec
        pool = cut(spec.schema, self.connector.allocate(pool_bytes(spec.schema)))
        fill(pool, spec.seed)
        self.pool = pool
        self._woken = threading.Event()
        self._unread: list[TransferEvent] = []
        self.connector.start(pool, self._woken.set)

    def publish(self, request_id: str, pages: Sequence[int], lease_seconds: float = 60.0) -> dict[str, Any]:
        """Publish full pages; the handle comes back as clients see it, through JSON."""
        handle = self.connector.publish(request_id, pages, len(pages) * self.spec.schema.page_size, lease_seconds)
        plain: dict[str, Any] = json.loads(json.dumps(handle))
        return plain

    def withdraw(self, request_id: str) -> None:
        """As the connector's."""
        self.connector.withdraw(request_id)

    def fetch(self, request_id: str, handle: dict[str, Any], pages: Sequence[int], first_page: int = 0) -> None:
        """As the connector's."""
        self.connector.fetch(request_id, handle, pages, first_page)

    def cancel(self, request_id: str) -> None:
        """As the connector's."""
        self.connector.cancel(request_id)

    def read(self, pages: Sequence[int]) -> list[bytes]:
        """The bytes of each page over all layers."""
        return read(self.pool, pages)

    def scribble(self, pages: Sequence[int], value: int) -> None:
        """Overwrite pages."""
        for tensor in (tensor for layer in self.pool for tensor in layer):
            tensor.view(torch.uint8).numpy()[list(pages)] = value

    def take(self) -> list[TransferEvent]:
        """Events that nobody has waited for, without waiting."""
        self._unread += self.connector.poll()
        events, self._unread = self._unread, []
        return events

    def wait(self, request_id: str, *kinds: EventKind) -> TransferEvent:
        """The next event of one of these kinds; waits for `wake` alone, so a connector that doesn't call it fails."""
        patience = self.spec.patience
        deadline = time.monotonic() + patience
        while True:
            self._woken.clear()
            self._unread += self.connector.poll()
            for event in self._unread:
                if event.request_id == request_id and event.kind in kinds:
                    self._unread.remove(event)
                    return event
            if not self._woken.wait(deadline - time.monotonic()):
                raise AssertionError(f"no {' or '.join(kinds)} for {request_id} within {patience:g} s: {self._unread}")

    def fetched(self, request_id: str) -> TransferEvent:
        """How a fetch ends."""
        return self.wait(request_id, EventKind.FETCHED, EventKind.FETCH_FAILED)

    def close(self) -> None:
        """Close the connector and drop the pool."""
        self.connector.close()
        self.pool = []


class RemoteEnd:
    """An end in a process of its own. Every method of `End` can be called through `call`."""

    def __init__(self, spec: EndSpec) -> None:
        context = multiprocessing.get_context("forkserver")  # clean as spawn, but torch is imported only once
        context.set_forkserver_preload([__name__, spec.module])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, spec), daemon=True)
        self._process.start()
        theirs.close()
        self.call("take")  # up and started

    def call(self, method: str, *args: Any) -> Any:
        """Call a method of the other process's end and wait for its result."""
        self._pipe.send((method, args))
        if not self._pipe.poll(PATIENCE):
            raise AssertionError(f"{method} did not return within {PATIENCE:g} s")
        result = self._pipe.recv()
        if isinstance(result, BaseException):
            raise result
        return result

    def signal(self, number: signal.Signals) -> None:
        """Stop, continue or kill the process; returns when it has happened, as far as that can be seen."""
        assert self._process.pid is not None, "the process was started"
        os.kill(self._process.pid, number)
        if number is signal.SIGKILL:
            self._process.join()

    def close(self) -> None:
        """End the process, whatever state it is in."""
        self._process.kill()
        self._process.join()
        self._process.close()
        self._pipe.close()


def _serve(pipe: Connection, spec: EndSpec) -> None:
    torch.set_num_threads(1)
    end = End(spec)
    while True:
        try:
            method, args = pipe.recv()
        except EOFError:
            end.close()
            return
        try:
            pipe.send(getattr(end, method)(*args))
        except Exception as error:  # carried to the caller
            pipe.send(error)


def page_bytes(schema: KVSchema) -> list[int]:
    """Bytes of a page of each part."""
    return [math.prod(shape) * torch.empty(0, dtype=dtype_of(schema)).element_size() for _, shape in schema.parts]


def dtype_of(schema: KVSchema) -> torch.dtype:
    """The schema's dtype as torch spells it."""
    dtype: torch.dtype = getattr(torch, schema.dtype)
    return dtype


def pool_bytes(schema: KVSchema) -> int:
    """Bytes of the whole pool."""
    return schema.layers * schema.num_pages * sum(page_bytes(schema))


def cut(schema: KVSchema, memory: Tensor | None) -> list[tuple[Tensor, ...]]:
    """The pool's tensors over the connector's memory, or over memory of their own."""
    if memory is None:
        memory = torch.zeros(pool_bytes(schema), dtype=torch.uint8)
    assert memory.dtype is torch.uint8, "allocate returns bytes"
    assert memory.shape == (pool_bytes(schema),), "allocate returns as many as it was asked for"
    sizes = [schema.num_pages * size for size in page_bytes(schema)] * schema.layers
    flat = [
        piece.view(dtype_of(schema)).view(schema.num_pages, *shape)
        for piece, (_, shape) in zip(torch.split(memory, sizes), schema.parts * schema.layers, strict=True)
    ]
    n = len(schema.parts)
    return [tuple(flat[at : at + n]) for at in range(0, len(flat), n)]


def fill(pool: Sequence[tuple[Tensor, ...]], seed: int) -> None:
    """Random bytes."""
    generator = torch.Generator().manual_seed(seed)
    for tensor in (tensor for layer in pool for tensor in layer):
        raw = tensor.view(torch.uint8)
        raw.copy_(torch.randint(0, 256, raw.shape, dtype=torch.uint8, generator=generator))


def read(pool: Sequence[tuple[Tensor, ...]], pages: Sequence[int]) -> list[bytes]:
    """The bytes of each page over all layers."""
    return [
        b"".join(t[page].contiguous().view(torch.uint8).numpy().tobytes() for la in pool for t in la) for page in pages
    ]


def expected(spec: EndSpec, pages: Sequence[int]) -> list[bytes]:
    """What an untouched end of this spec holds in these pages."""
    pool = cut(spec.schema, None)
    fill(pool, spec.seed)
    return read(pool, pages)


def differing(schema: KVSchema) -> dict[str, KVSchema]:
    """For each field that must agree, a schema that differs in it."""
    return {
        "weights": replace(schema, weights="others"),
        "layers": replace(schema, layers=schema.layers + 1),
        "page_size": replace(schema, page_size=schema.page_size * 2),
        "parts": replace(schema, parts=tuple((name, (*shape, 1)) for name, shape in schema.parts)),
        "dtype": replace(schema, dtype="float16"),
    }


__all__ = ["PATIENCE", "SCHEMA", "End", "EndSpec", "RemoteEnd", "differing", "expected"]
