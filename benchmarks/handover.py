"""Law 1 through every KV connector: prompts computed by one engine, answered by another, the text of `transformers`.

    python benchmarks/handover.py [--connectors local,tcp,nccl,rdma] [--mla FOLDER] [--threads 1]

{connector} x {SmolLM2, a tiny DeepSeek-V3} x {no drafts, n-gram, EAGLE where a head fits} x {both caches cold, prefix
with the producer, with both, with the consumer alone}. Greedy in float32. Ends with exit code 1 if any token differs.
"""

from __future__ import annotations

import argparse
import json
import logging
import random
import sys
import tempfile
import time
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DeepseekV3Config, DeepseekV3ForCausalLM

from engine.testing.parity import Build, Case, ParityBench, Traffic
from engine.testing.tokenizer import save_byte_tokenizer

logging.getLogger("engine").setLevel(logging.WARNING)
DATA = Path(__file__).parents[1] / "tests" / "data"


def smollm() -> tuple[list[str], list[Case]]:
    """The packaged model, a few prompts and the longest."""
    prompts = [p for name in ("parity.json", "parity_long.json") for p in json.loads((DATA / name).read_text())]
    chosen = [*prompts[:30:4], max(prompts, key=lambda p: len(p["prompt_token_ids"]))]
    return [], [Case(p["id"], p["prompt_token_ids"], p["fp32_token_ids"]) for p in chosen]


def tiny_deepseek(folder: Path) -> tuple[list[str], list[Case]]:
    """Random weights in the shape of DeepSeek-V3, and what transformers makes of random prompts."""
    torch.manual_seed(0)
    config = DeepseekV3Config(
        vocab_size=264,
        hidden_size=64,
        intermediate_size=96,
        moe_intermediate_size=32,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=4,
        q_lora_rank=24,
        kv_lora_rank=16,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=4,
        topk_group=2,
        first_k_dense_replace=1,
        initializer_range=0.2,
        eos_token_id=256,
    )
    DeepseekV3ForCausalLM(config).float().save_pretrained(folder)
    save_byte_tokenizer(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager")
    draw = random.Random(3)
    cases = []
    for length in (5, 17, 33, 60, 200):
        prompt = [draw.randrange(250) for _ in range(length)]
        tokens = list(prompt)
        with torch.inference_mode():
            for _ in range(24):
                tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
        cases.append(Case(f"tiny-{length}", prompt, tokens[length:]))
    return [f"model.source=path:{folder}", "kv_cache.page_size=8"], cases


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--connectors", default="local,tcp,nccl,rdma")
    parser.add_argument("--speculators", default="none,ngram,eagle")
    parser.add_argument("--targets", default="GQA,MLA")
    parser.add_argument("--threads", type=int, default=1)
    args = parser.parse_args()
    wrong = 0
    with tempfile.TemporaryDirectory() as temporary:
        targets = {"SmolLM2 (GQA)": smollm(), "tiny DeepSeek-V3 (MLA)": tiny_deepseek(Path(temporary) / "deepseek")}
        for connector in args.connectors.split(","):
            for name, (settings, cases) in targets.items():
                if not any(f"({kind})" in name for kind in args.targets.split(",")):
                    continue
                for speculator in args.speculators.split(","):
                    if speculator == "eagle" and "MLA" in name:
                        continue  # there is a head for SmolLM2 only; a random one is tested in the suite
                    base = ["model.dtype=float32", f"device.threads={args.threads}", "grammar=none", *settings]
                    wrong += run(Build(pair=connector, speculator=speculator), name, cases, base)
    return 1 if wrong else 0


def run(build: Build, target: str, cases: list[Case], base: list[str]) -> int:
    """The four kinds of prefix hits, in an order that makes them."""
    began, wrong = time.monotonic(), 0
    cells = []
    with ParityBench(build, base) as bench:
        for kind in ("both cold", "producer warm", "both warm", "consumer warm"):
            if kind == "consumer warm":
                bench.reset_producer()
                outcome = bench.run(Traffic(batch=4, keep=True), cases)
            else:
                outcome = bench.run(Traffic(batch=4, keep=kind == "both warm"), cases)
            wrong += len(outcome.wrong)
            verdict = "same" if not outcome.wrong else f"DIFFERENT {outcome.wrong}"
            cells.append(f"{kind}: {verdict}, {outcome.fetched}/{len(cases)} fetched, {outcome.drafted} drafted")
    print(
        f"{build.pair:6} {target:23} {build.speculator:6} {time.monotonic() - began:5.0f} s  {'; '.join(cells)}",
        flush=True,
    )
    return wrong


if __name__ == "__main__":
    sys.exit(main())
