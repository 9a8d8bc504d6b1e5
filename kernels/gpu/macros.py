"""What the kernels are compiled for: number types, widths of access, and sizes shared with them.

All of it goes to the compiler as macros, so that a kernel has no branch for what the host knows.
"""

from __future__ import annotations

import math
from typing import Final

import torch

from ..errors import LayoutError
from ..layout.layout import PagedKv
from ..maths.rope import Pairing, Rope
from ..tensors import Tensor

WARP: Final = 32  # threads; of every GPU so far
THREADS: Final = 256  # of a thread block at most, so that its registers fit; chosen
STAGES: Final = 4  # cells or pieces that a warp has on their way; chosen
PIECE: Final = 2048  # bytes of a piece of a run; chosen
COMMON_DEFINES: Final = (
    f"WARP={WARP}", f"MOST_THREADS={THREADS}", f"STAGES={STAGES}", f"PIECE={PIECE}"
)  # fmt: skip
"""What every kernel is compiled with: the sources state none of these numbers themselves."""
CXX_TYPES: Final = {
    torch.float32: "float",
    torch.float16: "Half",
    torch.bfloat16: "Bf16",
    torch.int8: "Int8",
}


def move_defines(source: PagedKv, target: PagedKv, rope: Rope) -> tuple[str, ...]:
    """Macros of ``kv_move``."""
    each = min(
        row_width(source) // source.layout.itemsize, row_width(target) // target.layout.itemsize
    )
    turn_each, pairs = _turned_at_once(rope, each)
    return (
        f"SOURCE_T={CXX_TYPES[source.layout.dtype]}", f"TARGET_T={CXX_TYPES[target.layout.dtype]}",
        f"SOURCE_BYTES={fetch_width(source)}", f"TARGET_BYTES={row_width(target)}",
        f"EACH={each}", f"TURN_EACH={turn_each}", f"PAIRS_EACH={pairs}",
        f"TURNS={-(-(rope.dims // 2) // (WARP * pairs))}", *COMMON_DEFINES,
    )  # fmt: skip


def _turned_at_once(rope: Rope, each: int) -> tuple[int, int]:
    """Values that a lane reads at once from a rotated row, of ``each`` that alignment allows, and
    the pairs that it turns; one by one where the rotation begins or ends between."""
    pairs, halves = rope.dims // 2, rope.pairing is Pairing.NEOX
    whole = pairs % each == 0 if halves else each > 1 and rope.dims % each == 0
    if rope.start % each or not whole:
        return 1, 1
    return each, each if halves else each // 2


def mass_defines(cache: PagedKv) -> tuple[str, ...]:
    """Macros of ``attention_mass``: by the widest access with which every key can be read."""
    size = cache.layout.key.dims * cache.layout.itemsize
    width = at_least_4(math.gcd(fetch_width(cache), size), cache.layout.name)
    source = f"SOURCE_T={CXX_TYPES[cache.layout.dtype]}"
    return (source, f"BYTES={width}", f"VECTORS={size // width}", *COMMON_DEFINES)


def confidence_defines(logits: Tensor) -> tuple[str, ...]:
    """Macros of ``confidence``: by the widest access that the rows' beginnings allow."""
    width = math.gcd(16, logits.data_ptr(), logits.stride(0) * logits.itemsize)
    return (f"SOURCE_T={CXX_TYPES[logits.dtype]}", f"BYTES={width}", *COMMON_DEFINES)


def fetch_width(kv: PagedKv) -> int:
    """Bytes of the widest access with which every cell can be read whole."""
    layout, size = kv.layout, kv.layout.itemsize
    strides = (layout.layer_stride, layout.block_stride, layout.head_stride, layout.cell)
    width = math.gcd(
        16, kv.memory.data_ptr(), *(stride * size for stride in strides),
        layout.key.token_outer * size,
    )  # fmt: skip
    return at_least_4(width, layout.name)


def row_width(kv: PagedKv) -> int:
    """Bytes of the widest access with which K and V can each be read or written."""
    size, rows = kv.layout.itemsize, (kv.layout.key.dims, kv.layout.value.dims)
    base = kv.layout.value.base
    return at_least_4(math.gcd(fetch_width(kv), base * size, *(r * size for r in rows)),
                       kv.layout.name)  # fmt: skip


def at_least_4(width: int, name: str) -> int:
    """``width``, the widest access in bytes, unless it is one that kernels do not have."""
    if width < 4:
        raise LayoutError(f"{name}: cells are aligned to {width} bytes; kernels need 4")
    return width
