"""The whole engine with the shape of Qwen2.5-7B and dummy weights: decode, prefill, time to the first token.

    python benchmarks/gpu/decode.py [--batches 1,8,64,256] [--rounds 2] [--skip long,mixed] [--set KEY=VALUE …]

Decode: prompt 128; the time for 256 output tokens minus that for 32, over 224 steps, best of so many rounds. Limits and
peers are those of the same card, see `benchmarks/results`. As in the HTTP process, nothing here imports torch.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import sys
import tempfile
import time
from pathlib import Path

BEGAN = time.monotonic()

sys.path.insert(0, str(Path(__file__).parent))
from shape import CONFIG  # noqa: E402

from engine import SamplingParams  # noqa: E402
from engine.client import EngineClient  # noqa: E402
from engine.config.load import load_config  # noqa: E402
from engine.config.model import EngineConfig  # noqa: E402

FLOORS = {1: 331, 8: 2630, 64: 19823, 256: 55868}  # tokens a second if memory and tensor cores did nothing else
REACH = {1: 270, 8: 2050, 64: 14500, 256: 33000}


def prompts(count: int, length: int, seed: int, most: int = 150000) -> list[list[int]]:
    draw = random.Random(seed)
    return [draw.choices(range(1000, most), k=length) for _ in range(count)]


class Bench:
    """One engine core in a process of its own, as the server runs it, and what was measured.

    Texts are not made: the HTTP process would do that, beside the core.
    """

    config, floors, reach = CONFIG, FLOORS, REACH
    rounds = 2

    def __init__(self, overrides: list[str]) -> None:
        folder = Path(tempfile.mkdtemp())
        (folder / "config.json").write_text(json.dumps(self.config))
        self.rows: dict[str, float] = {}
        self.seed = 0
        self._ids = itertools.count()
        self._loop = asyncio.new_event_loop()
        config = load_config(
            None,
            [
                f"model.source=path:{folder}",
                "model.loader=dummy",
                "device.kind=cuda",
                "scheduler.max_running=256",
                "scheduler.token_budget=8192",
                "model.max_context=16384",
                "kv_cache.memory=60GiB",
                *overrides,
            ],
        ).config
        self.client = self._loop.run_until_complete(self._start(config, folder))

    @staticmethod
    async def _start(config: EngineConfig, folder: Path) -> EngineClient:
        client = await EngineClient.spawn(config, folder)
        phase, ready = "", asyncio.ensure_future(client.wait_ready())
        while not ready.done():
            if client.phase is not None and client.phase.name != phase:
                phase = client.phase.name
                print(f"{time.monotonic() - BEGAN:6.1f} s  {phase}", flush=True)
            await asyncio.wait([ready], timeout=0.05)
        ready.result()
        return client

    def run(self, requests: list[list[int]], out: int) -> float:
        """Seconds until all have their tokens."""
        params = SamplingParams(temperature=0.0, max_tokens=out, ignore_eos=True)

        async def one(prompt: list[int]) -> int:
            news = self.client.generate(prompt, params, request_id=f"bench-{next(self._ids)}")
            return sum([len(output.token_ids) async for output in news])

        async def every() -> list[int]:
            return await asyncio.gather(*map(one, requests))

        began = time.perf_counter()
        counts = self._loop.run_until_complete(every())
        took = time.perf_counter() - began
        assert counts == [out] * len(requests)
        return took

    def close(self) -> None:
        self._loop.run_until_complete(self.client.close())

    def fresh(self, count: int, length: int) -> list[list[int]]:
        self.seed += 1
        return prompts(count, length, self.seed, self.config["vocab_size"] - 2000)

    def note(self, name: str, value: float, text: str) -> None:
        self.rows[name] = value
        print(f"{time.monotonic() - BEGAN:6.1f} s  {name:28} {text}", flush=True)

    def decode(self, batch: int, length: int = 128, name: str = "") -> None:
        requests = self.fresh(batch, length)
        self.run(requests, 32)
        best = 0.0
        for _ in range(self.rounds):
            short, long = self.run(requests, 32), self.run(requests, 256)
            best = max(best, batch * 224 / (long - short))
        limit, reach = self.floors.get(batch, 0), self.reach.get(batch, 0)
        if name:
            limit, reach = 6748, 5900
        self.note(
            name or f"decode {batch}",
            best,
            f"{best:8.0f} tok/s, {batch / best * 1e3:6.2f} ms a step, limit {limit}, reach {reach}"
            f" {'met' if reach and best >= reach else 'not met'}",
        )

    def prefill(self) -> None:
        self.run(self.fresh(1, 8192), 1)
        rates = [8 * 8192 / self.run(self.fresh(8, 8192), 1) for _ in range(self.rounds)]
        self.note("prefill 8 x 8192", max(rates), f"{max(rates):8.0f} tok/s, limit 53760, reach 45000")

    def first_token(self) -> None:
        def median(found: list[float]) -> float:
            return sorted(found)[len(found) // 2] * 1e3

        short = median([self.run(self.fresh(1, 128), 1) for _ in range(7)])
        self.note("TTFT 128", short, f"{short:8.1f} ms, reach 6.5")
        cold, hit = [], []
        for _ in range(5):
            request = self.fresh(1, 4096)
            cold.append(self.run(request, 1))
            self.run(request, 1)  # the second sight admits its prefix
            hit.append(self.run(request, 1))
        self.note("TTFT 4096 cold", median(cold), f"{median(cold):8.1f} ms, limit 72, reach 85")
        self.note("TTFT 4096 hit", median(hit), f"{median(hit):8.1f} ms, reach 7")

    def mixed(self) -> None:
        times = []
        for _ in range(self.rounds):
            (shared,) = self.fresh(1, 4000)
            own = self.fresh(200, 200)
            times.append(self.run([shared + tail for tail in own], 64))
        self.note("200 x (4000 shared + 200)", min(times), f"{min(times):8.2f} s, limit 1.65, reach 1.75")


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--batches", default="1,8,64,256")
    arguments.add_argument("--rounds", type=int, default=2)
    arguments.add_argument("--skip", default="")
    arguments.add_argument("--set", action="append", default=[], dest="overrides")
    arguments.add_argument("--json", type=Path)
    given = arguments.parse_args()
    skip = given.skip.split(",")
    bench = Bench(given.overrides)
    bench.rounds = given.rounds
    bench.note("ready", time.monotonic() - BEGAN, "weights are in")
    bench.run(bench.fresh(1, 16), 1)
    bench.note("start", time.monotonic() - BEGAN, "process to first token, reach 15 s")
    time.sleep(12)  # graphs come in behind; measured are the steps that users see from then on
    for batch in filter(None, given.batches.split(",")):
        bench.decode(int(batch))
    if "ttft" not in skip:
        bench.first_token()
    if "prefill" not in skip:
        bench.prefill()
    if "long" not in skip:
        bench.decode(64, 8064, "decode 64 at 8.2k")
    if "mixed" not in skip:
        bench.mixed()
    if given.json:
        given.json.write_text(json.dumps(bench.rows, indent=1))
    bench.close()
    from limits import versions

    print(versions())


if __name__ == "__main__":
    sys.exit(main())
