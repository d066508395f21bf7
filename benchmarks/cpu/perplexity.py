"""Perplexity of the default model on a fixed text, by quantization: `python benchmarks/cpu/perplexity.py [NAME …]`.

The text is the prompts of tests/data: prose, conversations, code and other scripts, 11,000 tokens. `float32` stands for
exact products; every other figure is also given as a ratio to bfloat16 weights and inputs (`packed`).
"""

from __future__ import annotations

import argparse
import json
import platform
from datetime import date
from pathlib import Path

import torch

from engine.llm import LLM
from engine.testing.perplexity import perplexity

DATA = Path(__file__).parents[2] / "tests" / "data"
SETTINGS = {
    "float32": ["model.dtype=float32", "quantization=none"],
    "packed": ["model.dtype=bfloat16", "quantization=packed"],
    "blocks": ["model.dtype=bfloat16", "quantization=blocks"],
    "int8": ["model.dtype=bfloat16", "quantization=int8"],
    "int4": ["model.dtype=bfloat16", "quantization=int4"],
}


def texts() -> list[list[int]]:
    """Token ids."""
    prompts = [p for name in ("parity", "parity_long") for p in json.loads((DATA / f"{name}.json").read_text())]
    return [prompt["prompt_token_ids"] for prompt in prompts]


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", default=list(SETTINGS), help=", ".join(SETTINGS))
    names = parser.parse_args().names
    print(f"{date.today()} · torch {torch.__version__} · Python {platform.python_version()} · ", end="")
    print(f"{sum(map(len, texts())):,} tokens\n\n{'':<10}{'perplexity':>12}{'to packed':>12}")
    found: dict[str, float] = {}
    for name in names:
        with LLM(None, SETTINGS[name]) as llm:
            found[name] = perplexity(llm.engine, texts())
        ratio = f"{found[name] / found['packed'] - 1:>+12.2%}" if "packed" in found else ""
        print(f"{name:<10}{found[name]:>12.4f}{ratio}", flush=True)


if __name__ == "__main__":
    main()
