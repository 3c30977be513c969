"""Compiles the Triton kernels of decoding for a GPU of the compute capability that is given."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from triton import compiler
from triton.backends.compiler import GPUTarget

from m2flow.generation import triton_attention, triton_sampling, triton_steps

TYPES = {"scale": "fp32", "cap": "fp32", "epsilon": "fp32"}
POINTERS = {
    "table": "i32",
    "lengths": "i32",
    "teams": "i32",
    "shared_tokens": "i32",
    "rotation": "fp32",
    "position": "i64",
    "token": "i64",
    "seeds": "i64",
    "positions": "i64",
    "tokens": "i64",
    "sums": "fp64",
    **dict.fromkeys(
        ("shared_made", "shared_highest", "shared_total", "made", "highest", "total", "logprobs"),
        "fp32",
    ),
}
NUMBERS = (
    "part_tokens",
    "kept_rows",
    "query_stride",
    "group_stride",
    "page_stride",
    "token_stride",
    "head_stride",
    "table_stride",
    "row_stride",
    "made_stride",
    "cell_stride",
)


def compiled(kernel: Any, warps: int, pointers: Mapping[str, str] = {}, **constants: Any) -> None:
    """A kernel's code for the GPU; what the constants do not name are arguments."""
    names, signature = kernel.arg_names, {}
    for name in names:
        if name in constants:
            signature[name] = "constexpr"
        elif name in NUMBERS:
            signature[name] = "i32"
        elif name in TYPES:
            signature[name] = TYPES[name]
        else:
            signature[name] = "*" + pointers.get(name, POINTERS.get(name, "bf16"))
    places = {(names.index(name),): value for name, value in constants.items()}
    divisible = {
        (place,): [["tt.divisibility", 16]]
        for place, name in enumerate(names)
        if signature[name][0] == "*" or name.endswith("stride")
    }
    source = compiler.ASTSource(kernel, signature, constexprs=places, attrs=divisible)
    target = GPUTarget("cuda", int(sys.argv[1]), 32)
    made = compiler.compile(source, target=target, options={"num_warps": warps, "num_stages": 3})
    assert made.asm["cubin"]
    assert made.metadata.shared <= 160 << 10, (kernel, made.metadata.shared)


pages = {"WIDTH": 128, "PADDED": 128, "PAGE": 256, "BLOCK": 64, "CAPPED": False}
for group in (1, 6, 7):
    padded = 1 << (group - 1).bit_length()
    compiled(
        triton_attention._attend_together,
        8,
        TEAM=16,
        GROUP=group,
        PADDED_GROUP=padded,
        PARTS=4,
        **pages,
    )
    for parts, shared in ((1, 0), (1, 4), (4, 2)):
        out = "fp32" if parts > 1 else "bf16"
        compiled(
            triton_attention._attend,
            4,
            pointers={"out": out, "highest": out, "total": out},
            GROUP=group,
            ROWS=16,
            WINDOW=0,
            PARTS=parts,
            SHARED_PARTS=shared,
            **pages,
        )
compiled(
    triton_attention._attend,
    4,
    pointers={"out": "bf16", "highest": "bf16", "total": "bf16"},
    GROUP=4,
    ROWS=16,
    WINDOW=300,
    PARTS=1,
    SHARED_PARTS=0,
    **{**pages, "CAPPED": True},
)
compiled(triton_attention._join, 1, WIDTH=128, PADDED=128, PARTS=3, PADDED_PARTS=4)
compiled(triton_steps._add_norm, 4, pointers={"made": "bf16"}, WIDTH=1536, PADDED=2048)
for kept in (True, False):
    compiled(
        triton_steps._rotate,
        4,
        HEADS=7,
        KV_HEADS=2,
        PAIRS=64,
        PADDED_HEADS=8,
        PADDED_PAIRS=64,
        KEPT=kept,
    )
compiled(triton_steps._silu_gate, 4, WIDTH=8960, BLOCK=1024)
compiled(
    triton_sampling._sample,
    8,
    INVERSE=1.0,
    VOCABULARY=152064,
    BLOCK=4096,
    BLOCKS=38,
    PADDED_BLOCKS=64,
)
