"""What ``kvgraph bench kernels`` measures on a GPU: pages × counts × models × dtype × alignment.

A *page* is one block of a paged cache, a single run of memory; its size is reached by taking as
many tokens, heads and layers of a model as fit. Needs torch alone.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np
import torch
from kvgraph.kernels.layout import KvLayout, gpu_layout
from kvgraph.kernels.rope import Pairing, Rope

PAGE_BYTES: Final = tuple(1 << bits for bits in range(11, 22, 2))  # 2 KiB … 2 MiB
PAGES: Final = (16, 64, 256, 1024, 8192)
DELTA: Final = 777
BLOCK_TOKENS: Final = 16


@dataclass(frozen=True)
class Shape:
    """A model as far as its cache goes; ``value_dims`` 0 is MLA's latent vector."""

    name: str
    layers: int
    heads: int
    key_dims: int
    value_dims: int
    theta: float
    rotated: int
    start: int = 0
    pairing: Pairing = Pairing.NEOX

    def rope(self) -> Rope:
        exponents = torch.arange(0, self.rotated, 2, dtype=torch.float64) / self.rotated
        return Rope(self.theta**-exponents, self.start, self.pairing)


LLAMA: Final = Shape("llama-8b", 32, 8, 128, 128, 5e5, 128)
SHAPES: Final = (
    LLAMA,
    Shape("qwen2.5-7b", 28, 4, 128, 128, 1e6, 128),
    Shape("mla", 61, 1, 576, 0, 1e4, 64, start=512, pairing=Pairing.GPTJ),
)


@dataclass(frozen=True)
class Cell:
    shape: Shape
    page: int  # about how many bytes a page of the bf16 cache has; ``cache(1)`` says exactly
    pages: int
    int8: bool  # whether the arena holds int8 copies
    aligned: bool  # whether tokens move by whole blocks

    def cache(self, blocks: int) -> KvLayout:
        shape, (layers, heads, tokens) = self.shape, self.geometry()
        return gpu_layout("BLHNC", layers, blocks, heads, tokens, shape.key_dims, shape.value_dims)

    def record(self) -> KvLayout:
        cache = self.cache(1)
        return cache.int8_record(self.pages) if self.int8 else cache.record(self.pages)

    def geometry(self) -> tuple[int, int, int]:
        """Layers, heads and tokens that fill a page: a block's tokens first, more of them last."""
        left = self.page / (2 * (self.shape.key_dims + self.shape.value_dims))
        counts = []
        for most in (BLOCK_TOKENS, self.shape.heads, self.shape.layers):
            counts.append(max(1, min(most, round(left))))
            left /= counts[-1]
        tokens, heads, layers = counts
        return layers, heads, tokens * max(1, round(left))

    @property
    def cache_bytes(self) -> int:
        return self.cache(1).block_bytes * self.pages

    @property
    def wire_bytes(self) -> int:
        """Bytes that cross the bus: those of the arena's side."""
        return self.record().block_bytes * self.pages

    def describe(self) -> dict[str, Any]:
        layers, heads, tokens = self.geometry()
        return {
            "shape": self.shape.name, "page_bytes": self.cache(1).block_bytes,
            "pages": self.pages, "dtype": "int8" if self.int8 else "bf16",
            "aligned": self.aligned, "layers": layers, "heads": heads, "tokens": tokens,
            "bytes": self.wire_bytes, "bf16_bytes": self.cache_bytes,
        }  # fmt: skip


class Places(NamedTuple):
    """Where a cell's tokens stand; blocks are scattered on both sides."""

    records: Any  # int64 [pages], the arena's; ``blocks`` likewise the cache's
    blocks: Any
    old: Any  # int64 [pages · tokens], slots in the arena; ``new`` likewise in the cache
    new: Any
    delta: Any  # int64 [pages · tokens]


def places(cell: Cell) -> Places:
    """The same for the same cell; a cache needs ``pages + 1`` blocks."""
    random = torch.Generator().manual_seed(cell.pages)
    blocks = torch.randperm(cell.pages + 1, generator=random)
    records = torch.randperm(cell.pages, generator=random)
    tokens = cell.geometry()[2]
    old = slots_of(records, tokens)
    shift = 0 if cell.aligned else max(1, tokens // 3)
    new = slots_of(blocks, tokens)[shift : shift + len(old)]
    return Places(records, blocks[: cell.pages], old, new, torch.full_like(old, DELTA))


def slots_of(blocks: Any, tokens: int) -> Any:
    return (blocks[:, None] * tokens + torch.arange(tokens)).reshape(-1)


def cells() -> Iterator[Cell]:
    """The matrix, the smallest first; a page of one token cannot be unaligned."""
    made = [
        Cell(shape, page, pages, int8, aligned)
        for shape in SHAPES for page in PAGE_BYTES for pages in PAGES
        for int8 in (False, True) for aligned in (True, False)
    ]  # fmt: skip
    for cell in sorted(made, key=lambda cell: cell.cache_bytes):
        if cell.aligned or cell.geometry()[2] > 1:
            yield cell


def predicted_seconds(wire_bytes: int, peak: float, launch: float) -> float:
    """Bytes over the copy engine's measured peak (bytes/s), and what an empty move takes."""
    return wire_bytes / peak + launch


LARGE: Final = 8 << 20  # bf16 bytes from which bandwidth, not launching, is the limit
_COPIES: Final = ("batched_copy", "index_copy")  # who leaves the bytes of a warm
_TURNS: Final = ("copy_then_rotate", "three_passes")  # and those of a splice
SOLO_SLACK: Final = 1.15
SOLO_SECONDS: Final = 10e-6


@dataclass(frozen=True)
class Measured:
    name: str
    samples: list[float]  # one a cell, or one a repetition
    unit: str
    target: str = ""  # what is to be reached, in words

    def as_dict(self) -> dict[str, Any]:
        low, middle, high = (float(f"{x:.5g}") for x in np.percentile(self.samples, (0, 50, 100)))
        return {
            "value": middle, "unit": self.unit, "spread": [low, high], "n": len(self.samples),
            "target": self.target,
        }  # fmt: skip


def summary(
    rows: list[dict[str, Any]], prefill: dict[str, list[float]], solo: tuple[int, list[float]],
    peak: float,
) -> list[Measured]:  # fmt: skip
    """The figures; those that nothing was measured for are left out."""
    size, seconds = solo
    limit = SOLO_SLACK * size / peak + SOLO_SECONDS
    warm = [row["times"]["warm"]["gb_per_s"] * 1e9 / peak for row in _large(rows, "bf16", "warm")]
    over = [
        row["times"]["splice"]["us"] / row["times"]["warm"]["us"]
        for row in _large(rows, "bf16", "warm", "splice")
    ]
    int8 = [
        row["times"]["splice"]["bf16_gb_per_s"] * 1e9 / peak
        for row in _large(rows, "int8", "splice")
    ]
    equal = [float(row["equals_reference"]) for row in rows if "equals_reference" in row]
    turns = zip(prefill.get("prefill", []), prefill.get("splice", []), strict=True)
    made = [
        Measured("copy_engine_gb_per_s", [peak / 1e9], "GB/s"),
        Measured("warm_of_copy_engine", warm, "of peak", "≥ 0.95"),
        Measured("warm_of_copy_engine_worst", _worst(warm, min), "of peak", "≥ 0.95"),
        Measured("warm_over_best_rival", _over_rivals(rows, "warm", _COPIES), "× time", "≤ 1"),
        Measured("splice_over_best_rival", _over_rivals(rows, "splice", _TURNS), "× time", "≤ 1"),
        Measured("splice_over_warm", over, "× time", "≤ 1.02"),
        Measured("splice_over_warm_worst", _worst(over, max), "× time", "≤ 1.02"),
        Measured("splice_int8_of_copy_engine", int8, "of peak, as bf16 bytes", "≥ 1.8"),
        Measured("splice_64_of_limit", [s / limit for s in seconds], "of 1.15×+10 µs", "≤ 1"),
        Measured("splice_vs_prefill_1280", [p / s for p, s in turns], "×", "≥ 10"),
        Measured("equals_reference", _worst(equal, min), "share of cells", "1"),
    ]
    return [figure for figure in made if figure.samples]


def _large(rows: list[dict[str, Any]], dtype: str, *names: str) -> Iterator[dict[str, Any]]:
    """Aligned cells of at least ``LARGE`` bytes of bf16 in which all of the names were measured."""
    for row in rows:
        times = row.get("times", {})
        measured = all("us" in times.get(name, {}) for name in names)
        if row["dtype"] == dtype and row["aligned"] and row["bf16_bytes"] >= LARGE and measured:
            yield row


def _over_rivals(rows: list[dict[str, Any]], ours: str, rivals: tuple[str, ...]) -> list[float]:
    """Our time over that of the fastest rival, in each cell that has one."""
    ratios = []
    for row in _large(rows, "bf16", ours):
        theirs = [row["times"][name]["us"] for name in rivals if "us" in row["times"].get(name, {})]
        if theirs:
            ratios.append(row["times"][ours]["us"] / min(theirs))
    return ratios


def _worst(samples: list[float], which: Any) -> list[float]:
    return [which(samples)] if samples else []
