"""Compile the Gluon kernels for Hopper and print what came of it as JSON; no GPU is needed.

A program of its own, since Triton's own functions can't be compiled in a process that interprets kernels.
"""

from __future__ import annotations

import json
import re
import subprocess
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.experimental.gluon._runtime import GluonASTSource

from engine.plugins.attention.flashmla.launch import RAW, TILE
from engine.plugins.attention.flashmla.narrow import narrow
from engine.plugins.attention.flashmla.wide import wide

TYPES = {"out": "*bf16", "partial": "*fp32", "partial_lse": "*fp32", "scales": "*fp32", "scale": "fp32"}
TYPES |= {"table_row": "i32", "requests": "i32"}


def described(kind: str, rows: int, columns: int, layout: Any = TILE) -> str:
    return f"tensordesc<{kind}[{rows}, {columns}],{layout!r}>"


def stack(cubin: bytes) -> int:
    """Bytes of stack a thread, where spilled registers go."""
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        Path(file.name).write_bytes(cubin)
        tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
        report = subprocess.run([tool, "-res-usage", file.name], capture_output=True, text=True, check=True)
    found = re.search(r"STACK:(\d+)", report.stdout + report.stderr)
    assert found, report
    return int(found[1])


def compiled(kernel: Any, rows: int, left: str, fixed: dict[str, Any]) -> dict[str, Any]:
    tiles = (described("bf16", rows, 256), described("bf16", rows, 64), left, described("bf16", 64, 64))
    types = TYPES | dict(zip(kernel.arg_names, tiles, strict=False)) | dict.fromkeys(fixed, "constexpr")
    source = GluonASTSource(kernel, {name: types.get(name, "*i32") for name in kernel.arg_names}, fixed, {})
    made = triton.compile(source, target=GPUTarget("cuda", 90, 32), options={"num_warps": 4})
    products = sorted(set(re.findall(r"wgmma\.mma_async\.sync\.aligned\.(m64n\d+k16)", made.asm["ptx"])))
    return {"shared": made.metadata.shared, "stack": stack(made.asm["cubin"]), "products": products}


def main() -> None:
    plain, raw = described("bf16", 64, 256), described("fp8e4nv", 64, 512, RAW)
    few = {"HEADS": 16, "ROW_BLOCKS": 1, "PDL": True}
    many = {"HEADS": 128, "ROW_BLOCKS": 2, "PDL": True}
    found = {
        "wide": compiled(wide, 64, plain, many),
        "narrow": compiled(narrow, 16, plain, few | {"PACKED": False}),
        "packed": compiled(narrow, 16, raw, few | {"PACKED": True}),
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
