"""One real vLLM engine that shares a store: who computes, who loads, and what fails."""

from __future__ import annotations

import contextlib
import random
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

from one_engine import BLOCK, new_llm, run_program

CONTEXT = 12 * BLOCK
PATIENCE_S = 60.0
SLOW_S = 0.15  # per record, by a store that turned slow
REST_S = 2.2  # after two failures in a row the store is not asked for two seconds


class Stage:
    """An engine that is stepped by hand."""

    def __init__(self, model: str) -> None:

        self.engine = new_llm(model, blocks=64).llm_engine
        self.scheduler = self.engine.engine_core.engine_core.scheduler
        self.side = self.scheduler.connector.side if self.scheduler.connector else None
        self.answers: dict[str, Any] = {}
        if self.side is not None:  # so small a model computes faster than anything loads
            costs = self.side.bridge.ledger.costs
            costs.worth_loading = costs.worth_asking = lambda *_: True

    @property
    def counts(self) -> dict[str, float]:
        return asdict(self.side.bridge.ledger.counts) if self.side else {}

    @property
    def lanes(self) -> Any:
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        return get_kv_transfer_group().worker.mover.lanes

    def serve(self, name: str, tokens: list[int], tag: Any = None) -> dict[str, Any]:
        """Serve one request to its end, and let the store have what it takes."""
        from vllm import SamplingParams, TokensPrompt

        sampling = SamplingParams(
            max_tokens=8, temperature=0, ignore_eos=True,
            extra_args={"kv_transfer_params": {"kvgraph": {"session": name, **(tag or {})}}},
        )  # fmt: skip
        before, began = self.counts, time.monotonic()
        self.engine.add_request(name, TokensPrompt(prompt_token_ids=tokens), sampling)
        self.until(lambda: name in self.answers)
        seconds = time.monotonic() - began
        self.settle()
        answer, after = self.answers[name], self.counts
        changed = {key: after[key] - before[key] for key in after if after[key] != before[key]}
        return {**answer, "seconds": seconds, "counts": changed}

    def until(self, done: Callable[[], object]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not done():
            for output in self.engine.step():
                if output.finished:
                    cached = output.num_cached_tokens or 0
                    text = list(output.outputs[0].token_ids)
                    computed = len(output.prompt_token_ids) - cached
                    self.answers[output.request_id] = {"text": text, "computed": computed}
            if time.monotonic() > deadline:
                raise SystemExit("what was awaited did not come")

    def settle(self) -> None:
        self.until(lambda: not self.scheduler.has_requests())
        if self.side is None:
            return
        from vllm.distributed.kv_transfer import get_kv_transfer_group

        bridge, worker = self.side.bridge, get_kv_transfer_group().worker
        connector = self.scheduler.connector

        def over() -> bool:
            """Of what was shared last, an idle engine would hear with its next step only."""
            worker.take_finished()
            bridge.answered(worker.take_answer())
            return not len(bridge.ledger.book) and not connector.has_pending_push_work()

        self.until(over)


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
    stage = Stage(options["model"])
    served: dict[str, Any] = {}
    for name, number in options["contexts"].items():
        fault = FAULTS.get(name) if options.get("faults") else None
        with fault(stage, Path(options["store"])) if fault else contextlib.nullcontext():
            tag = {"share": False} if name == "private" else None
            served[name] = stage.serve(name, [*context(number), 7, 8, 9], tag)
        if fault is not None:
            time.sleep(REST_S)
    return {"served": served, "imported": sorted(_store_modules())}


def _store_modules() -> set[str]:
    """Of libraries that a store needs; our own side of it is small."""
    return {name for name in sys.modules if name.startswith("mooncake")}


if __name__ == "__main__":
    run_program(main)
