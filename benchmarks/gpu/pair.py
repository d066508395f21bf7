"""Two GPUs of one host: how fast KV moves between them, and what dividing prefill from decode does to running streams.

    python benchmarks/gpu/pair.py [--connectors nccl,rdma] [--slices 32,64] [--skip transfer,streams] [--one-card]

Transfer: the KV of 4,096 tokens of an 8B shape (32 layers, 8 KV heads of 128, bf16: 0.54 GB) in scattered pages of 16
tokens, from `fetch` to FETCHED, acknowledgement included, with and without digests, beside the peer copy of as many
bytes in the same run. Streams: 50 streams of the shape of Qwen2.5-7B decode while 4,000-token prompts arrive, in one
engine and in two, beside the same streams alone.

With --one-card both ends are on one GPU, which NCCL refuses: the copy is one within the card, so what remains is what
the host adds; and the prompts of the streams are computed before, so what remains is what fetching adds.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import multiprocessing
import os
import random
import statistics
import sys
import tempfile
import threading
import time
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from decode import CONFIG, prompts
from limits import versions

from engine import SamplingParams
from engine.client import EngineClient
from engine.config.load import load_config
from engine.specs.kv_connector import EventKind, KVConnector, KVSchema, Role

PAGES, POOL = 256, 1024
SCHEMA = KVSchema(
    weights="8b",
    layers=32,
    page_size=16,
    parts=(("k", (8, 16, 128)), ("v", (8, 16, 128))),
    dtype="bfloat16",
    num_pages=POOL,
)
BYTES = PAGES * SCHEMA.layers * 2 * 8 * 16 * 128 * 2
ROUNDS, ALONE = 20, 6


class End:
    """A connector with a pool on a GPU."""

    def __init__(self, name: str, role: Role, gpu: int, check: float, slice_bytes: int) -> None:
        torch.cuda.set_device(gpu)
        links = "device" if name == "nccl" else "links"
        for module in ("transport.link", "transport.line", "transport.slices", f"plugins.kv_connectors.{name}.{links}"):
            import_module(f"engine.{module}").SLICE_BYTES = slice_bytes
        plugin = import_module(f"engine.plugins.kv_connectors.{name}")
        (offer,) = plugin.kv_connectors()
        options = offer.options(check=check)
        self.connector: KVConnector = offer.build(options, role=role, schema=SCHEMA, engine_id=role.value)
        chance = torch.Generator(f"cuda:{gpu}").manual_seed(int(role is Role.CONSUMER))
        self.pool = [
            tuple(
                torch.randint(0, 2**15, (POOL, *shape), dtype=torch.int16, device=f"cuda:{gpu}", generator=chance).view(
                    torch.bfloat16
                )
                for _, shape in SCHEMA.parts
            )
            for _ in range(SCHEMA.layers)
        ]
        torch.cuda.synchronize()
        self._news = threading.Event()
        self.connector.start(self.pool, self._news.set)

    def fetched(self, request_id: str) -> None:
        """Wait for the end of a fetch."""
        deadline = time.perf_counter() + 30
        while time.perf_counter() < deadline:
            self._news.wait(1)  # spinning here would hold the interpreter's lock against the connector's thread
            self._news.clear()
            for event in self.connector.poll():
                if event.request_id == request_id:
                    assert event.kind is EventKind.FETCHED, event.reason
                    return
        raise TimeoutError(request_id)


def produce(pipe: Connection, name: str, check: float, slice_bytes: int) -> None:
    """The producer's process."""
    end = End(name, Role.PRODUCER, 0, check, slice_bytes)
    pipe.send("ready")
    while (word := pipe.recv()) is not None:
        request_id, pages = word
        if pages:
            pipe.send(end.connector.publish(request_id, pages, PAGES * SCHEMA.page_size, 30.0))
        else:
            end.connector.withdraw(request_id)
            pipe.send(int(sum(int(part[:PAGES].view(torch.int16).sum()) for layer in end.pool for part in layer)))
    end.connector.close()


def peer_copy(gpu: int) -> float:
    """GB/s of plain copies from GPU 0."""
    source = torch.ones(BYTES, dtype=torch.uint8, device="cuda:0")
    target = torch.empty(BYTES, dtype=torch.uint8, device=f"cuda:{gpu}")
    times = []
    for _ in range(10):
        torch.cuda.synchronize(0), torch.cuda.synchronize(gpu)
        began = time.perf_counter()
        target.copy_(source)
        torch.cuda.synchronize(0), torch.cuda.synchronize(gpu)
        times.append(time.perf_counter() - began)
    return BYTES / min(times) / 1e9


def transfer(name: str, check: float, slice_bytes: int, gpu: int) -> list[float]:
    """Seconds of fetches, one after the other, digests made before. The first, which makes the link, and those that
    follow a pause are left out."""
    context = multiprocessing.get_context("spawn")
    pipe, theirs = context.Pipe()
    process = context.Process(target=produce, args=(theirs, name, check, slice_bytes), daemon=True)
    process.start()
    end = End(name, Role.CONSUMER, gpu, check, slice_bytes)
    assert pipe.recv() == "ready"
    chance, times = random.Random(1), []
    for i in range(ROUNDS):
        pipe.send((f"r{i}", chance.sample(range(POOL), PAGES)))
    handles = [pipe.recv() for _ in range(ROUNDS)]
    time.sleep(0.5)
    for i, handle in enumerate(handles):
        if i < ALONE:
            time.sleep(0.1)
        began = time.perf_counter()
        end.connector.fetch(f"r{i}", handle, chance.sample(range(POOL), PAGES), 0)
        end.fetched(f"r{i}")
        times.append(time.perf_counter() - began)
    for i in range(ROUNDS):
        pipe.send((f"r{i}", []))
        pipe.recv()
    pipe.send(("last", list(range(PAGES))))
    handle = pipe.recv()
    end.connector.fetch("last", handle, list(range(PAGES)), 0)
    end.fetched("last")
    pipe.send(("last", []))
    mine = int(sum(int(part[:PAGES].view(torch.int16).sum()) for layer in end.pool for part in layer))
    assert pipe.recv() == mine, "the pages differ"
    pipe.send(None)
    end.connector.close()
    process.join(20)
    paused = statistics.median(times[1:ALONE]) * 1e3
    print(f"  first fetch, link included: {times[0] * 1e3:.0f} ms; after pauses of 0.1 s: {paused:.2f} ms", flush=True)
    return times[ALONE:]


def transfers(names: list[str], slices: list[int], gpu: int) -> None:
    """The table of transfers from GPU 0."""
    before = peer_copy(gpu)
    print(f"peer copy {before:.0f} GB/s, {BYTES / 1e9:.2f} GB", flush=True)
    for name in names:
        for check in (0.0, 1.0):
            for size in slices:
                try:
                    times = transfer(name, check, size * 2**20, gpu)
                except Exception as error:
                    print(f"{name:6} check {check:g} slice {size:3} MiB: {type(error).__name__}: {error}", flush=True)
                    continue
                best, middle = BYTES / min(times) / 1e9, BYTES / statistics.median(times) / 1e9
                print(
                    f"{name:6} check {check:g} slice {size:3} MiB: median {middle:5.0f} GB/s, best {best:5.0f}; "
                    f"{middle / before:.2f} of the peer copy; {statistics.median(times) * 1e3:.2f} ms",
                    flush=True,
                )
    print(f"peer copy again {peer_copy(gpu):.0f} GB/s", flush=True)


# Streams


class Engines:
    """One engine, or two that hand over."""

    def __init__(self, folder: Path, divided: str | None, *, gpu: int) -> None:
        self._loop = asyncio.new_event_loop()
        self._ids = itertools.count()
        self._ahead = divided is not None and gpu == 0
        self.clients = [
            self._loop.run_until_complete(self._start(folder, gpu, role, divided))
            for gpu, role in ([(0, "producer"), (gpu, "consumer")] if divided else [(0, "")])
        ]
        for client in self.clients:
            self._loop.run_until_complete(client.wait_ready())

    @staticmethod
    async def _start(folder: Path, gpu: int, role: str, connector: str | None) -> EngineClient:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(gpu)
        connectors = [f"kv_connectors=[{{use: {connector}, role: {role}}}]"] if connector else []
        config = load_config(
            None,
            [
                f"model.source=path:{folder}",
                "model.loader=dummy",
                "device.kind=cuda",
                "scheduler.max_running=64",
                "scheduler.token_budget=2048",
                "model.max_context=8192",
                "kv_cache.memory=30GiB",
                *connectors,
            ],
        ).config
        return await EngineClient.spawn(config, folder)

    def measure(self, streams: int, out: int, arrivals: int, every: float) -> tuple[list[float], list[float]]:
        """Gaps between the tokens of the streams once all run, and seconds to the first token of what arrives."""
        return self._loop.run_until_complete(self._measure(streams, out, arrivals, every))

    async def _measure(self, streams: int, out: int, arrivals: int, every: float) -> tuple[list[float], list[float]]:
        gaps: list[float] = []
        firsts: list[float] = []
        running = asyncio.Event()
        begun = 0

        async def stream(prompt: list[int]) -> None:
            nonlocal begun
            last, count = 0.0, 0
            async for output in self._generate(self.clients[-1], prompt, out):
                now = time.perf_counter()
                count += len(output.token_ids)
                if count == 32:
                    begun += 1
                    if begun == streams:
                        running.set()
                if running.is_set() and last:
                    gaps.append(now - last)
                last = now

        async def prefill(prompt: list[int]) -> dict[str, Any] | None:
            handle = None
            if len(self.clients) > 1:
                async for output in self._generate(self.clients[0], prompt, 1, {"do_remote_decode": True}):
                    handle = output.kv_transfer or handle
            return handle

        async def arrive(prompt: list[int], handle: dict[str, Any] | None) -> None:
            began = time.perf_counter()
            handle = handle or await prefill(prompt)
            async for output in self._generate(self.clients[-1], prompt, 8, handle):
                if output.token_ids:
                    firsts.append(time.perf_counter() - began)
                    break

        ahead = [(prompt, await prefill(prompt) if self._ahead else None) for prompt in prompts(arrivals, 4000, 11)]
        tasks = [asyncio.create_task(stream(prompt)) for prompt in prompts(streams, 128, 7)]
        await running.wait()
        gaps.clear()
        extra = []
        for prompt, handle in ahead:
            extra.append(asyncio.create_task(arrive(prompt, handle)))
            await asyncio.sleep(every)
        await asyncio.gather(*tasks, *extra)
        return gaps, firsts

    def _generate(self, client: EngineClient, prompt: list[int], out: int, handle: dict[str, Any] | None = None) -> Any:
        params = SamplingParams(temperature=0.0, max_tokens=out, ignore_eos=True)
        return client.generate(prompt, params, request_id=f"pair-{next(self._ids)}", kv_transfer=handle)

    def close(self) -> None:
        for client in self.clients:
            self._loop.run_until_complete(client.close())


def streams(connector: str, gpu: int) -> None:
    """The table of streams; the second engine is on `gpu`."""
    folder = Path(tempfile.mkdtemp())
    (folder / "config.json").write_text(json.dumps(CONFIG))
    idle = {}
    for name, divided in [("undivided", None)] * (gpu > 0) + [(f"divided, {connector}", connector)]:
        engines = Engines(folder, divided, gpu=gpu)
        try:
            engines.measure(4, 48, 2, 0.3)
            for case, arrivals in (("idle", 0), ("prompts arrive", 10)):
                gaps, firsts = engines.measure(50, 350, arrivals, 0.25)
                gaps.sort()
                p50, p99 = (gaps[int(len(gaps) * share)] * 1e3 for share in (0.5, 0.99))
                idle.setdefault("p99", p99)
                first = f", TTFT {statistics.median(firsts) * 1e3:.0f} ms" if firsts else ""
                print(
                    f"{name:16} {case:15} ITL p50 {p50:6.2f} p99 {p99:6.2f} ms, "
                    f"{p99 / idle['p99']:.2f} of the idle p99{first}",
                    flush=True,
                )
        finally:
            engines.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connectors", default="nccl,rdma", help="the first is the one that the streams go by")
    parser.add_argument("--slices", default="32,64", help="sizes of a slice in MiB")
    parser.add_argument("--skip", default="", help="transfer or streams")
    parser.add_argument("--one-card", action="store_true", help="both ends on GPU 0")
    args = parser.parse_args()
    print(versions(), flush=True)
    gpu = 0 if args.one_card else 1
    if "transfer" not in args.skip:
        transfers(args.connectors.split(","), [int(size) for size in args.slices.split(",")], gpu)
    if "streams" not in args.skip:
        streams(args.connectors.split(",")[0], gpu)


if __name__ == "__main__":
    main()
