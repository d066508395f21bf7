"""What drafting and verifying a chain costs beside the shape of Qwen2.5-7B with dummy weights, and whether it is right.

    python benchmarks/gpu/spec.py [--drafts 4] [--accept 3] [--batches 1,4,8] [--set KEY=VALUE …]
    python benchmarks/gpu/spec.py --same MODEL      a model drafts for itself: all is accepted, the text is unchanged

The head is an EAGLE-3 head of random weights with a vocabulary of 32,000; acceptance is forced, since random weights
agree on nothing. Steps are timed twice: through the whole engine, and as the graphs alone.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

sys.path.insert(0, str(Path(__file__).parent))
from limits import versions
from shape import CONFIG, write

from engine import LLM, SamplingParams
from engine.cuda import drafts

HEAD = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "hidden_size": CONFIG["hidden_size"],
    "intermediate_size": CONFIG["intermediate_size"],
    "num_attention_heads": CONFIG["num_attention_heads"],
    "num_key_value_heads": CONFIG["num_key_value_heads"],
    "num_hidden_layers": 1,
    "vocab_size": CONFIG["vocab_size"],
    "draft_vocab_size": 32000,
    "rms_norm_eps": 1e-6,
    "max_position_embeddings": 32768,
    "tie_word_embeddings": False,
}


def write_head(folder: Path) -> None:
    """A public-format head of random weights."""
    from safetensors.torch import save_file

    from engine.plugins.speculators.eagle.shape import read_shape, tensors

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(HEAD))
    random = torch.Generator(device="cuda").manual_seed(1)
    made: dict[str, torch.Tensor] = {}
    for name, shape in tensors(read_shape(HEAD)).items():
        if len(shape) == 1:
            made[name] = torch.ones(shape, dtype=torch.bfloat16)
        else:
            drawn = torch.randn(shape, generator=random, device="cuda", dtype=torch.float32) * 0.02
            made[name] = drawn.to(torch.bfloat16).cpu()
    ids = torch.arange(HEAD["draft_vocab_size"]) * (HEAD["vocab_size"] // HEAD["draft_vocab_size"])
    made["d2t"] = ids - torch.arange(len(ids))
    save_file(made, folder / "model.safetensors")


def settled(llm: LLM) -> Any:
    """The runner, once all its graphs are captured."""
    executor: Any = llm.engine.executor
    runner = executor._runner
    drafting = runner._drafted.drafting if runner._drafted else None
    kinds = (runner._decodes, runner._spread, runner._shared, drafting)
    while any(graphs is not None and graphs.next is not None for graphs in kinds):
        time.sleep(0.1)
    time.sleep(0.5)
    return runner


def rate(llm: LLM, batch: int) -> tuple[float, float]:
    """Tokens a second of a stream, and steps a second: 256 output tokens less 32, best of two."""

    def run(out: int) -> tuple[float, int]:
        prompts = torch.randint(1000, 150000, (batch, 128)).tolist()
        before, began = llm.engine.scheduler.steps, time.perf_counter()
        params = SamplingParams(temperature=0.0, max_tokens=out, ignore_eos=True)
        llm.generate(prompts, params)
        return time.perf_counter() - began, llm.engine.scheduler.steps - before

    run(32)
    best = (0.0, 0.0)
    for _ in range(2):
        (short, few), (long, many) = run(32), run(256)
        best = max(best, (224 / (long - short), (many - few) / (long - short)))
    return best


def graph_time(llm: LLM, replay: Callable[[Any], None], count: int = 50) -> float:
    """Milliseconds of what the runner replays, on its own thread and stream."""
    executor: Any = llm.engine.executor

    @torch.inference_mode()
    def measure() -> float:
        replay(executor._runner)
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        for _ in range(count):
            replay(executor._runner)
        end.record()
        end.synchronize()
        return float(begin.elapsed_time(end)) / count

    return float(executor._thread.submit(measure).result())


def cost(given: argparse.Namespace) -> None:
    """Print what steps take with and without drafts."""
    folder = Path(tempfile.mkdtemp())
    write(folder / "target", 32768)
    write_head(folder / "head")
    base = [
        f"model.source=path:{folder / 'target'}",
        "model.loader=dummy",
        "device.kind=cuda",
        "scheduler.max_running=16",
        "scheduler.token_budget=2048",
        "model.max_context=4096",
        "kv_cache.memory=8GiB",
        "grammar=none",
        *given.set,
    ]
    batches = [int(batch) for batch in given.batches.split(",")]
    plain: dict[int, tuple[float, float]] = {}
    with LLM(overrides=base) as llm:
        settled(llm)
        for batch in batches:
            plain[batch] = rate(llm, batch)
            print(f"plain, batch {batch}: {1e3 / plain[batch][1]:.3f} ms a step", flush=True)
        alone = graph_time(llm, lambda runner: runner._decodes.replay(1))
        print(f"plain, graph of one decode: {alone:.3f} ms", flush=True)
    drafts.agreeing = lambda sampled, drafted: torch.full(
        (len(sampled),), given.accept, dtype=torch.int64, device=sampled.device
    )
    chain = [f"speculator.max_draft={given.drafts}", "speculator.controller=false", "speculator.use=eagle"]
    with LLM(overrides=[*base, *chain, f"speculator.options.head=path:{folder / 'head'}"]) as llm:
        settled(llm)
        for batch in batches:
            tokens, steps = rate(llm, batch)
            print(
                f"{given.drafts} drafts, {given.accept} accepted, batch {batch}: {1e3 / steps:.3f} ms a step, "
                f"{plain[batch][1] / steps:.3f} x a plain step; {tokens / plain[batch][0]:.2f} x the tokens",
                flush=True,
            )
        verify = graph_time(llm, lambda runner: runner._drafted.drafting.verify(1))
        follow = graph_time(llm, lambda runner: runner._drafted.drafting.follow(1))
        print(
            f"graphs alone: verify {verify:.3f} ms, follow and draft {follow:.3f} ms: "
            f"{(verify + follow) / alone:.3f} x",
            flush=True,
        )


def same(given: argparse.Namespace) -> int:
    """A model drafts for itself."""
    source = f"path:{given.same}"
    base = [f"model.source={source}", "device.kind=cuda", "model.dtype=float32", "grammar=none", *given.set]
    chain = ["speculator.use=draft_model", f"speculator.options.source={source}", "speculator.controller=false"]
    prompts = ["Once upon a time", "The capital of France", "def f(x):\n", "1, 2, 3, 4,", "Dear Sir"] * 2
    params = SamplingParams(temperature=0.0, max_tokens=64, ignore_eos=True)
    seeded = SamplingParams(temperature=0.9, top_p=0.9, seed=3, max_tokens=48, ignore_eos=True)
    rounds = ((1, params), (3, params), (10, params), (3, seeded))
    texts, wrong = list[list[list[int]]](), 0
    for speculator in ([], chain):
        with LLM(overrides=[*base, *speculator]) as llm:
            for moment in ("while graphs are captured", "with graphs"):
                if moment == "with graphs":
                    settled(llm)
                for batch, chosen in rounds:
                    texts.append([c.token_ids for c in llm.generate(prompts[:batch], chosen)])
                    if speculator:
                        want = texts[len(texts) - 1 - 2 * len(rounds)]
                        differ = sum(a != b for a, b in zip(texts[-1], want, strict=True))
                        wrong += differ
                        print(f"{moment}, batch {batch}: {differ} of {batch} differ", flush=True)
            if llm.engine.drafter:
                count = llm.engine.drafter.counters
                print(f"{count.accepted} of {count.drafted} drafts accepted, {count.faults} faults", flush=True)
    return wrong


def main() -> int:
    arguments = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    arguments.add_argument("--drafts", type=int, default=4)
    arguments.add_argument("--accept", type=int, default=3)
    arguments.add_argument("--batches", default="1,4,8")
    arguments.add_argument("--same", default="")
    arguments.add_argument("--set", action="append", default=[])
    given = arguments.parse_args()
    if given.same:
        return 1 if same(given) else 0
    print(versions(), flush=True)
    cost(given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
