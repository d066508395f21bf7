"""Law 2 on real processes: after aborts, refusals and killed peers every page is free or cached.

A producer computes prompts, a consumer goes on from their KV; the consumer is killed at random and replaced. The model
is tiny and random, the processes, sockets, shared memory and signals are real.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from engine.client import CoreFailed, EngineClient
from engine.config.load import load_config
from engine.messages import FinishReason, Output
from engine.sampling_params import SamplingParams

REQUESTS = 2000
KILLS = 6
LEASE = 1.5
TINY = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 128,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10000.0,
    "tie_word_embeddings": True,
    "eos_token_id": 2,
}


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    (folder / "config.json").write_text(json.dumps(TINY))
    return folder


async def start(folder: Path, role: str) -> EngineClient:
    config = load_config(
        None,
        [
            f"model.source=path:{folder}",
            "model.loader=dummy",
            "model.dtype=float32",
            "device.threads=1",
            "kv_cache.page_size=8",
            "kv_cache.pages=200",
            "scheduler.max_running=8",
            "scheduler.max_waiting=24",
            "scheduler.token_budget=128",
            f"kv_connectors=[{{use: local, role: {role}, lease_seconds: {LEASE}, fetch_timeout: 5}}]",
        ],
    ).config
    client = await EngineClient.spawn(config, folder)
    await client.wait_ready()
    return client


async def drain(stream: AsyncIterator[Output], after: int | None = None) -> Output | None:
    """Read a request's news to its end, or hang up after so many."""
    last = None
    async with contextlib.aclosing(stream) as outputs:  # type: ignore[type-var]
        async for output in outputs:
            last = output
            after = None if after is None else after - 1
            if after == 0:
                return None
    return last


async def one(number: int, rng: random.Random, producer: EngineClient, consumers: list[EngineClient]) -> str:
    """One client: alone on the producer, or handed over to the consumer of the moment. Says how it ended."""
    shared = [7, 8, 9] * 8 if rng.random() < 0.5 else []
    prompt = shared + [rng.randrange(3, 128) for _ in range(rng.randrange(1, 60))]
    params = SamplingParams(max_tokens=rng.randrange(1, 16), seed=number, ignore_eos=True)
    hang_up = rng.randrange(1, 5) if rng.random() < 0.25 else None
    await asyncio.sleep(rng.random() * 8)
    if rng.random() < 0.5:
        last = await drain(producer.generate(prompt, params, request_id=f"a{number}"), hang_up)
        return outcome(last)
    first = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    transfer: dict[str, Any] = {"do_remote_decode": True}
    last = await drain(producer.generate(prompt, first, request_id=f"p{number}", kv_transfer=transfer))
    if last is None or last.kv_transfer is None:
        return outcome(last)
    if rng.random() < 0.15:
        return "never fetched"
    try:
        stream = consumers[-1].generate(prompt, params, request_id=f"d{number}", kv_transfer=last.kv_transfer)
        return outcome(await drain(stream, hang_up))
    except CoreFailed:
        return "peer dead"


def outcome(last: Output | None) -> str:
    if last is None:
        return "hung up"
    if last.refused:
        return "refused"
    if last.finish_reason is FinishReason.ERROR:
        return "error"
    return "finished"


async def settled(client: EngineClient, patience: float) -> dict[str, Any]:
    """Counters once nothing runs and nothing is published, or as they stand when patience ends."""
    stats = await client.control("stats")
    for _ in range(int(patience / 0.1)):
        stats = await client.control("stats")
        if not (stats["running"] or stats["waiting"] or stats["transfers"] or stats["kv_cache"]["held"]):
            break
        await asyncio.sleep(0.1)
    return stats


@pytest.mark.timeout(280)
def test_every_page_is_free_or_cached_after_random_traffic(tiny: Path) -> None:
    asyncio.run(balance(tiny))


async def balance(folder: Path) -> None:
    rng = random.Random(11)
    producer, consumers = await start(folder, "producer"), [await start(folder, "consumer")]
    try:
        work = [asyncio.create_task(one(i, rng, producer, consumers)) for i in range(REQUESTS)]
        for _ in range(KILLS):
            await asyncio.sleep(rng.random())
            consumers[-1]._process.send_signal(signal.SIGKILL)
            consumers.append(await start(folder, "consumer"))
        ends = await asyncio.gather(*work)
        assert {"finished", "hung up", "refused", "never fetched"} <= set(ends), set(ends)
        # A consumer that dies takes its own requests along, and those only.
        assert ends.count("error") + ends.count("peer dead") < 0.2 * REQUESTS
        for client in (producer, consumers[-1]):
            stats = await settled(client, patience=4 * LEASE)
            assert (stats["running"], stats["waiting"], stats["transfers"]) == (0, 0, [])
            cache = stats["kv_cache"]
            assert cache["held"] == 0
            assert cache["free"] + cache["cached"] == cache["pages"] == 200
    finally:
        for client in (producer, *consumers):
            await client.close()
