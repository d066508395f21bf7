"""Compile the Gluon kernel for Hopper and print what came of it as JSON; no GPU is needed.

A program of its own, since Triton's own functions can't be compiled in a process that interprets kernels.
"""

from __future__ import annotations

import json
import re

import triton
from compiled import stack
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from engine.plugins.attention.flashmla.launch import TILE
from engine.plugins.attention.flashmla.wide import wide

TYPES = {"out": "*bf16", "partial": "*fp32", "partial_lse": "*fp32", "scale": "fp32"}
TYPES |= {"table_row": "i32", "requests": "i32"}


def described(columns: int) -> str:
    return f"tensordesc<bf16[64, {columns}],{TILE!r}>"


def main() -> None:
    fixed = {"HEADS": 128, "ROW_BLOCKS": 2, "PDL": True}
    tiles = (described(128), described(64)) * 2
    types = TYPES | dict(zip(wide.arg_names, tiles, strict=False)) | dict.fromkeys(fixed, "constexpr")
    source = GluonASTSource(wide, {name: types.get(name, "*i32") for name in wide.arg_names}, fixed, {})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    products = sorted(set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m64n\d+k16)", made.asm["ptx"])))
    print(json.dumps({"shared": made.metadata.shared, "stack": stack(made.asm["cubin"]), "products": products}))


if __name__ == "__main__":
    main()
