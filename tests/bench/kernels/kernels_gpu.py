"""``kvgraph bench kernels`` on a GPU: the matrix, beside what others do and what was predicted.

Needs torch, numpy and cuda-core, and no engine: ``python -P -m kvgraph_bench.kernels.kernels_gpu``
prints one JSON object a line: the machine, each cell as soon as it is measured, the summary.
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from typing import Any, Final

import torch

from .kernels_matrix import Cell, Measured, cells, summary
from .kernels_workbench import PREFILL_TOKENS, Workbench

SECONDS: Final = 400.0  # after which no more cells are begun

Say = Callable[[str], None]
Emit = Callable[[dict[str, Any]], None]


def run(say: Say, emit: Emit, seconds: float = SECONDS) -> list[Measured]:
    device = torch.device("cuda", torch.cuda.current_device())
    with torch.cuda.stream(torch.cuda.Stream(device)):  # batches refuse the default one
        return _run(device, say, emit, seconds)


def _run(device: torch.device, say: Say, emit: Emit, seconds: float) -> list[Measured]:
    ends = time.monotonic() + seconds
    say("page-locking host memory, measuring the copy engine")
    bench = Workbench(device)
    say("measuring which method is best")
    emit({"bench": "kernels", "machine": bench.machine()})
    say(f"splicing {PREFILL_TOKENS} tokens, and prefilling them")
    prefill, solo = bench.prefill(), bench.solo()
    rows = []
    for number, cell in enumerate(cells()):
        if number % 20 == 0:
            say(f"cell {number}: {cell.shape.name}, {cell.pages} pages of {cell.page} bytes")
        rows.append(_row(bench, cell, time.monotonic() < ends))
        emit(rows[-1])
    return summary(rows, prefill, solo, bench.peaks["to_device"])


def _row(bench: Workbench, cell: Cell, in_time: bool) -> dict[str, Any]:
    """A cell that fails must not take what was measured with it."""
    if not in_time:
        return {**cell.describe(), "skipped": "time"}
    try:
        return bench.row(cell)
    except Exception as error:
        return {**cell.describe(), "failed": f"{type(error).__name__}: {error}"}


def main() -> None:
    if not torch.cuda.is_available():
        sys.exit("this needs a GPU; `kvgraph bench kernels` measures CPUs too")
    began = time.monotonic()
    figures = run(lambda text: _say(f"{time.monotonic() - began:6.1f} s  {text}"), _print)
    _print({"figures": {figure.name: figure.as_dict() for figure in figures}})


def _print(entry: dict[str, Any]) -> None:
    sys.stdout.write(json.dumps(entry) + "\n")
    sys.stdout.flush()


def _say(text: str) -> None:
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    main()
