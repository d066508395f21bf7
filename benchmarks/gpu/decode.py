"""The whole engine with the shape of Qwen2.5-7B and dummy weights: decode, prefill, time to the first token.

    python benchmarks/gpu/decode.py [--batches 1,8,64,256] [--skip long,mixed] [--set KEY=VALUE …] [--json FILE]

Decode: prompt 128; the time for 256 output tokens minus that for 32, over 224 steps, best of two. Limits and peers are
those of the same card, see `benchmarks/results`.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from pathlib import Path

BEGAN = time.monotonic()

import torch  # noqa: E402

from engine import LLM, SamplingParams  # noqa: E402

CONFIG = {
    "architectures": ["Qwen2ForCausalLM"],
    "model_type": "qwen2",
    "hidden_size": 3584,
    "intermediate_size": 18944,
    "num_hidden_layers": 28,
    "num_attention_heads": 28,
    "num_key_value_heads": 4,
    "vocab_size": 152064,
    "max_position_embeddings": 32768,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
FLOORS = {1: 331, 8: 2630, 64: 19823, 256: 55868}  # tokens a second if memory and tensor cores did nothing else
REACH = {1: 270, 8: 2050, 64: 14500, 256: 33000}


def prompts(count: int, length: int, seed: int) -> list[list[int]]:
    drawn = torch.randint(1000, 150000, (count, length), generator=torch.Generator().manual_seed(seed))
    return [list(map(int, row)) for row in drawn]


class Bench:
    """One engine and what was measured."""

    def __init__(self, overrides: list[str]) -> None:
        folder = Path(tempfile.mkdtemp())
        (folder / "config.json").write_text(json.dumps(CONFIG))
        (folder / "tokenizer.json").write_text(json.dumps(tiny_tokenizer()))
        began = time.monotonic()
        self.llm = LLM(
            overrides=[
                f"model.source=path:{folder}",
                "model.loader=dummy",
                "device.kind=cuda",
                "scheduler.max_running=256",
                "scheduler.token_budget=8192",
                "model.max_context=16384",
                "kv_cache.memory=60GiB",
                *overrides,
            ]
        )
        self.rows: dict[str, float] = {"imports": began - BEGAN, "LLM()": time.monotonic() - began}
        self.seed = 0
        for part, choice in self.llm.composition.parts():
            if part in ("attention", "quantization"):
                print(part, choice.name, flush=True)

    def run(self, requests: list[list[int]], out: int) -> float:
        """Seconds until all have their tokens."""
        began = time.perf_counter()
        done = self.llm.generate(requests, SamplingParams(temperature=0.0, max_tokens=out, ignore_eos=True))
        took = time.perf_counter() - began
        assert all(len(completion.token_ids) == out for completion in done)
        return took

    def fresh(self, count: int, length: int) -> list[list[int]]:
        self.seed += 1
        return prompts(count, length, self.seed)

    def note(self, name: str, value: float, text: str) -> None:
        self.rows[name] = value
        print(f"{time.monotonic() - BEGAN:6.1f} s  {name:28} {text}", flush=True)

    def decode(self, batch: int, length: int = 128, name: str = "") -> None:
        requests = self.fresh(batch, length)
        self.run(requests, 32)
        best = 0.0
        for _ in range(2):
            short, long = self.run(requests, 32), self.run(requests, 256)
            best = max(best, batch * 224 / (long - short))
        limit, reach = FLOORS.get(batch, 0), REACH.get(batch, 0)
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
        rates = [8 * 8192 / self.run(self.fresh(8, 8192), 1) for _ in range(2)]
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
        for _ in range(2):
            (shared,) = self.fresh(1, 4000)
            own = self.fresh(200, 200)
            times.append(self.run([shared + tail for tail in own], 64))
        self.note("200 x (4000 shared + 200)", min(times), f"{min(times):8.2f} s, limit 1.65, reach 1.75")

    def profile(self, batch: int, folder: Path) -> None:
        """Kernels of decode steps by time, and the share of a step in which the device is idle."""
        from torch.profiler import ProfilerActivity, profile

        requests = self.fresh(batch, 128)
        self.run(requests, 32)
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            self.run(requests, 64)
        spans = sorted((e.time_range.start, e.time_range.end, e.name) for e in seen.events() if "CUDA" in str(e.device_type))
        spans = spans[len(spans) // 2 :]
        busy, idle, reach = 0.0, 0.0, spans[0][0]
        names: dict[str, list[float]] = {}
        for start, end, name in spans:
            idle += max(0.0, start - reach)
            busy += max(0.0, end - max(start, reach))
            reach = max(reach, end)
            names.setdefault(name, []).append(end - start)
        print(f"profile {batch}: idle {idle / (busy + idle):.3f} of {(busy + idle) / 1e3:.1f} ms, {len(spans)} kernels")
        for name, took in sorted(names.items(), key=lambda pair: -sum(pair[1]))[:14]:
            print(f"   {sum(took) / 1e3:8.2f} ms {len(took):6} x {sum(took) / len(took):7.1f} µs  {name[:90]}")


def tiny_tokenizer() -> dict[str, object]:
    return {"version": "1.0", "model": {"type": "WordLevel", "vocab": {"a": 0}, "unk_token": "a"}, "added_tokens": []}


def main() -> None:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--batches", default="1,8,64,256")
    arguments.add_argument("--skip", default="")
    arguments.add_argument("--set", action="append", default=[], dest="overrides")
    arguments.add_argument("--json", type=Path)
    given = arguments.parse_args()
    skip = given.skip.split(",")
    bench = Bench(given.overrides)
    first = bench.run(bench.fresh(1, 16), 1)
    bench.note("start", time.monotonic() - BEGAN, f"process to first token {time.monotonic() - BEGAN:.1f} s")
    print(torch.cuda.get_device_name(), "torch", torch.__version__, f"first request {first:.2f} s", bench.rows)
    for batch in filter(None, given.batches.split(",")):
        bench.decode(int(batch))
    if "profile" not in skip:
        for batch in (1, 64):
            bench.profile(batch, Path("."))
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
    bench.llm.close()


if __name__ == "__main__":
    sys.exit(main())
