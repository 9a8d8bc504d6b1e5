"""One real vLLM engine that shares a store: who computes, who loads, and what fails."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

from one_engine import BLOCK, PATIENCE_S, SteppedEngine, run_program

CONTEXT = 12 * BLOCK
SLOW_S = 0.15  # per record, by a store that turned slow
REST_S = 2.2  # after two failures in a row the store is not asked for two seconds


class Stage(SteppedEngine):
    @property
    def lanes(self) -> Any:
        return self.worker.mover.lanes

    def served(self, name: str, tokens: list[int], tag: Any) -> dict[str, Any]:
        """Serve one request to its end, and let the store have what it takes."""
        before, began = self.counts, time.monotonic()
        self.add(name, tokens, tag=tag)
        self.until(lambda: name in self.answers)
        seconds = time.monotonic() - began
        self.settle()
        after, cached = self.counts, self.answers[name].num_cached_tokens or 0
        changed = {key: after[key] - before[key] for key in after if after[key] != before[key]}
        return {
            "text": self.text(name), "computed": len(tokens) - cached, "seconds": seconds,
            "counts": changed,
        }  # fmt: skip

    def is_settled(self) -> bool:
        self.worker.take_finished()
        return super().is_settled() and not self.connector.has_pending_push_work()


def context(number: int) -> list[int]:
    dice = random.Random(number)
    return [dice.randrange(3, 500) for _ in range(CONTEXT)]


# Faults -----------------------------------------------------------------------------------------


@contextlib.contextmanager
def other_bytes(stage: Stage, store: Path) -> Iterator[None]:
    """Each value is another block's, whole and under a name of this store."""
    files = sorted(store.glob("*/*/*.kv"))
    contents = [file.read_bytes() for file in files]
    for file, content in zip(files, [*contents[1:], contents[0]], strict=True):
        file.write_bytes(content)
    yield


@contextlib.contextmanager
def gone(stage: Stage, store: Path) -> Iterator[None]:
    """The directory is not there."""
    away = store.with_name("away")
    store.rename(away)
    yield
    away.rename(store)


@contextlib.contextmanager
def slow(stage: Stage, store: Path) -> Iterator[None]:
    """Every read takes its time."""
    with _reads(stage, lambda: time.sleep(SLOW_S)):
        yield


@contextlib.contextmanager
def hanging(stage: Stage, store: Path) -> Iterator[None]:
    """Reads do not come back."""
    leave = threading.Event()
    with _reads(stage, lambda: leave.wait(PATIENCE_S)):
        yield
        leave.set()
        time.sleep(REST_S)


@contextlib.contextmanager
def _reads(stage: Stage, first: Callable[[], object]) -> Iterator[None]:
    records = stage.lanes.store_in.records
    real = records.read

    def read(*args: Any) -> bool:
        first()
        return bool(real(*args))

    with mock.patch.object(records, "read", read):
        yield


FAULTS = {"slow": slow, "hanging": hanging, "gone": gone, "other_bytes": other_bytes}


def main(options: dict[str, Any]) -> dict[str, Any]:
    stage = Stage(options["model"], blocks=64)
    served: dict[str, Any] = {}
    for name, number in options["contexts"].items():
        fault = FAULTS.get(name) if options.get("faults") else None
        with fault(stage, Path(options["store"])) if fault else contextlib.nullcontext():
            tag = {"share": False} if name == "private" else None
            served[name] = stage.served(name, [*context(number), 7, 8, 9], tag)
        if fault is not None:
            time.sleep(REST_S)
    return {"served": served, "imported": sorted(_store_modules())}


def _store_modules() -> set[str]:
    """Of libraries that a store needs; our own side of it is small."""
    return {name for name in sys.modules if name.startswith("mooncake")}


if __name__ == "__main__":
    run_program(main)
