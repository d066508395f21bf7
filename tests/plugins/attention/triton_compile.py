"""Compile kernels of `triton` for Hopper and print how much stack each takes as JSON; no GPU is needed.

The interpreter does not check types as the compiler does. A program of its own, since Triton's own functions can't be
compiled in a process that interprets kernels.
"""

from __future__ import annotations

import json
from typing import Any

import triton
from compiled import stack
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.experimental.gluon import language as gl
from triton.experimental.gluon._runtime import GluonASTSource

from engine.plugins.attention.triton import decode, gather, hopper

HEADS = {"DIM": 128, "V_DIM": 128}
DECODE = {"GROUP": 7, "KV_HEADS": 4, "ROWS": 16, "DIM_PAD": 128, "V_PAD": 128, "PAGE": 16, "BLOCK": 128, "STAGES": 3}
DECODE |= {"SOFTCAP": False, "WINDOW": False, "PRECISION": "tf32", "PACKED": False, "STORE": True, "ROTATE": False}
DECODE |= {"SHARED": True, "SPLITS": 8, "EARLY": True, **HEADS}
TILES = {"GROUP": 7, "HEADS": 28, "ROWS": 128, "BLOCK": 128, "PAST": True, "num_warps": 8, **HEADS}
GATHER = {"HEADS": 4, "PAGE": 16, "ROWS": 128, **HEADS}

ROWS = ("q", "k", "v", "k_pages", "v_pages", "k_scales", "v_scales", "out")
FLOATS = ("partial_out", "partial_stats", "shared_out", "shared_stats", "cos_sin")
TABLES = ("counters", "shared_parts", "items", "seq_lens", "block_tables", "blocks", "query_start", "pasts")
TYPES = dict.fromkeys(ROWS, "*bf16") | dict.fromkeys(FLOATS, "*fp32") | dict.fromkeys(TABLES, "*i32")
TYPES |= {"slot_mapping": "*i64", "positions": "*i64", "scale": "fp32", "softcap": "fp32"}


def spilled(source: Any, warps: int) -> int:
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": warps})
    return stack(made.asm["cubin"])


def signature(kernel: Any, fixed: dict[str, Any], types: dict[str, str]) -> dict[str, str]:
    return {name: "constexpr" if name in fixed else types.get(name, "i32") for name in kernel.arg_names}


def plain(kernel: Any, fixed: dict[str, Any]) -> ASTSource:
    types = signature(kernel, fixed, TYPES)
    places = {(kernel.arg_names.index(name),): value for name, value in fixed.items()}
    aligned = [i for i, kind in enumerate(types.values()) if kind.startswith("*") or kind == "i32"]
    return ASTSource(kernel, types, places, {(i,): [["tt.divisibility", 16]] for i in aligned})


def main() -> None:
    layout = gl.NVMMASharedLayout.get_default_for([128, 128], gl.bfloat16)
    tiles = dict.fromkeys(("q_desc", "k_desc", "v_desc"), f"tensordesc<bf16[128, 128],{layout!r}>")
    kernel = hopper.prefill_tiles
    found = {
        "decode": spilled(plain(decode.decode, DECODE), 4),
        "gather": spilled(plain(gather.gather, GATHER), 8),
        "tiles": spilled(GluonASTSource(kernel, signature(kernel, TILES, TYPES | tiles), TILES, {}), 8),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
