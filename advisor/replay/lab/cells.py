"""The cells of a table: independent of each other, so that they can run in several processes."""

from __future__ import annotations

import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from typing import Any, TypeVar

from threadpoolctl import threadpool_limits

Shared = TypeVar("Shared")
Cell = TypeVar("Cell")
Found = TypeVar("Found")


def run_cells(
    run: Callable[[Shared, Cell], Found], shared: Shared, cells: Sequence[Cell], processes: int
) -> Iterator[tuple[Cell, Found]]:
    """Yield every cell with ``run(shared, cell)`` as it is done; cells begin in their order.

    Args:
        run: A function of a module: other processes import it.
        shared: Sent to each process once.
        processes: 1 runs all cells in this one.
    """
    if processes == 1 or len(cells) == 1:
        with threadpool_limits(1, user_api="blas"):
            for cell in cells:
                yield cell, run(shared, cell)
        return
    spawn = multiprocessing.get_context("spawn")  # a fork of a threaded process may hang
    with ProcessPoolExecutor(processes, spawn, _adopt, (run, shared)) as pool:
        running = {pool.submit(_run_cell, cell): cell for cell in cells}
        for future in as_completed(running):
            yield running[future], future.result()


_worker: dict[str, Any] = {}


def _adopt(run: Callable[[Any, Any], Any], shared: Any) -> None:
    # Matrices are small here, and every core has a process already.
    threadpool_limits(1, user_api="blas")
    _worker.update(run=run, shared=shared)
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End with the parent: otherwise a worker whose parent was killed would wait for work
    for ever."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def _run_cell(cell: Any) -> Any:
    return _worker["run"](_worker["shared"], cell)
