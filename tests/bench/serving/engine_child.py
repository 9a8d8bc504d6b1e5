"""A real vLLM engine in a process of its own, driven over a pipe: it serves, and tells how it went.

Only its process has vLLM and our hooks, because the switch is read once. The scheduler runs in the
thread that steps, so that what our hooks cost a step is measured where it is paid.
"""

from __future__ import annotations

import functools
import multiprocessing
import os
import resource
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Final, NamedTuple

from ..errors import ServerError

CALLS: Final = (
    "on_new_request", "get_num_new_matched_tokens", "update_state_after_alloc",
    "build_connector_meta", "update_connector_output", "has_pending_push_work",
    "request_finished", "request_finished_all_groups", "take_events",
)  # fmt: skip
"""What vLLM's scheduler calls of a connector while it steps."""


class StepWatch:
    """Sums up what the calls of one step took; what the watching itself takes is left out."""

    def __init__(self) -> None:
        self._spent = 0.0
        self._inside = False

    def over(self, connector: Any, calls: Sequence[str] = CALLS) -> None:
        for name in calls:
            setattr(connector, name, self._measured(getattr(connector, name)))

    def take(self) -> float:
        spent, self._spent = self._spent, 0.0
        return spent

    def _measured(self, original: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(original)
        def call(*args: Any, **kwargs: Any) -> Any:
            if self._inside:  # one of the others called it
                return original(*args, **kwargs)
            self._inside = True
            ran, waited = _of_this_thread()
            started = time.perf_counter()
            try:
                return original(*args, **kwargs)
            finally:
                ended = time.perf_counter()
                then = Moment(ended, *_of_this_thread())
                self._spent += Moment(started, ran, waited).until(then)
                self._inside = False

        return call


class Moment(NamedTuple):
    """A thread's clocks in seconds, and how often it gave its core away to wait for something.

    The clock on the wall is the last to be read before what is measured and the first after it, so
    that reading the others, which asks the kernel, is no part of it.
    """

    wall: float
    ran: float
    waited: int

    def until(self, then: Moment) -> float:
        """Seconds that count: those on the wall, if anything was waited for on the way.

        A thread that waited for nothing, no lock and no other thread, was not kept by anybody of
        its process: where it still ran for less than passed, its core was given to another process
        or the whole machine stood still, and what it ran counts.
        """
        passed = then.wall - self.wall
        return passed if then.waited > self.waited else min(passed, then.ran - self.ran)


def _of_this_thread() -> tuple[float, int]:
    """Seconds that it ran, and how often it gave its core away to wait."""
    return time.thread_time(), resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw


BLOCK: Final = 32
BLOCKS: Final = 192  # of the pool: four for each of the requests at once, and half as many
WIDTH: Final = 32  # requests at once
PROMPT_BLOCKS: Final = 3
OUTPUT: Final = 2  # tokens
_START_TIMEOUT_S: Final = 300.0
_ANSWER_TIMEOUT_S: Final = 300.0


@dataclass
class Served:
    answered: int = 0  # with all the tokens that were asked for
    failed: int = 0  # otherwise, or with an exception
    # seconds that each engine step spent in our hooks
    waits: list[float] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)  # what was raised, in words

    def __iadd__(self, other: Served) -> Served:
        self.answered += other.answered
        self.failed += other.failed
        self.waits += other.waits
        self.errors += other.errors
        return self


class EngineChild:
    def __init__(self, model: Path, log: Path, endpoint: str | None) -> None:
        context = multiprocessing.get_context("spawn")
        self._log = log
        self._mine, theirs = context.Pipe()
        self._process = context.Process(
            target=_live, args=(str(model), str(log), endpoint, theirs), daemon=True
        )
        self._theirs = theirs

    def __enter__(self) -> EngineChild:
        self._process.start()
        self._theirs.close()
        try:
            self._hear(_START_TIMEOUT_S)
        except BaseException:
            self._process.kill()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()

    def go(self) -> None:
        """Serve without end, ``WIDTH`` requests at once."""
        self._ask("go")

    def rest(self) -> Served:
        """Serve what has begun, and no more; all that was served since the last rest."""
        served: Served = self._ask("rest")
        return served

    def first_tokens(self, count: int) -> list[float]:
        """Seconds to the first token of so many new prompts, one at a time."""
        times: list[float] = self._ask("first_tokens", count)
        return times

    def is_in_step(self) -> bool:
        """Whether the ranking that it holds names exactly the blocks that its pool has cached."""
        return bool(self._ask("is_in_step"))

    def kill(self) -> None:
        self._process.kill()
        self._process.join()

    def _ask(self, what: str, *args: Any) -> Any:
        try:
            self._mine.send((what, *args))
        except OSError:
            raise self._gone() from None
        return self._hear(_ANSWER_TIMEOUT_S)

    def _hear(self, seconds: float) -> Any:
        try:
            if self._mine.poll(seconds):
                return self._mine.recv()
        except (EOFError, OSError):
            pass
        raise self._gone()

    def _gone(self) -> ServerError:
        lines = self._log.read_text(errors="replace").splitlines()[-30:]
        return ServerError("the engine ended or hangs; the end of its log:\n" + "\n".join(lines))


# In the engine's process ------------------------------------------------------------------------


class _Engine:
    def __init__(self, model: str) -> None:
        from vllm import LLM

        llm = LLM(
            model, dtype="float32", block_size=BLOCK, gpu_memory_utilization=0.3,
            max_model_len=512, num_gpu_blocks_override=BLOCKS, enforce_eager=True,
            max_num_seqs=WIDTH, disable_log_stats=True,
        )  # fmt: skip
        self._engine: Any = llm.llm_engine
        self._scheduler: Any = self._engine.engine_core.engine_core.scheduler
        self._watch = StepWatch()
        if self._side is not None:
            self._watch.over(self._scheduler.connector)
        self._served = Served()
        self._numbers: Iterator[int] = iter(range(1 << 62))
        self._serving = False

    @property
    def _side(self) -> Any:
        return getattr(self._scheduler.connector, "side", None)

    def listen(self, line: Connection) -> None:
        line.send("ready")
        while True:
            if not self._serving or line.poll():
                what, *args = line.recv()
                line.send(getattr(self, what)(*args))
            if self._serving:
                self._refill()
                self._step()

    def go(self) -> None:
        self._serving = True

    def rest(self) -> Served:
        self._serving = False
        while self._engine.has_unfinished_requests():
            self._step()
        served, self._served = self._served, Served()
        return served

    def first_tokens(self, count: int) -> list[float]:
        times = []
        for _ in range(count):
            self._ask(output=1)
            started = time.perf_counter()
            while self._engine.has_unfinished_requests():
                self._step()
            times.append(time.perf_counter() - started)
        return times

    def is_in_step(self) -> bool:
        from kvgraph.hooks.keys import GROUP_BYTES, key_of

        ranking = self._side.client.ranking() if self._side is not None else None
        if ranking is None:
            return False
        hashes = (block.block_hash for block in self._scheduler.kv_cache_manager.block_pool.blocks)
        cached = {key_of(each[:-GROUP_BYTES]) for each in hashes if each is not None}
        return {*ranking.order.tolist(), *ranking.protected.tolist()} == cached

    def _refill(self) -> None:
        while self._engine.get_num_unfinished_requests() < WIDTH:
            self._ask(OUTPUT)

    def _ask(self, output: int) -> None:
        """One more request: half of them go on from a prompt that was served before."""
        from vllm import SamplingParams, TokensPrompt

        number = next(self._numbers)
        branch = number // 2 if number % 2 else number
        tokens = [3 + (branch * 7 + at) % 500 for at in range(2)]
        tokens += [3 + (branch + at * 11) % 500 for at in range(BLOCK * PROMPT_BLOCKS)]
        sampling = SamplingParams(max_tokens=output, temperature=0, ignore_eos=True)
        name = f"r{number}"
        self._engine.add_request(name, TokensPrompt(prompt_token_ids=tokens), sampling)

    def _step(self) -> None:
        served = self._served
        try:
            outputs = self._engine.step()
        except Exception as error:
            served.failed += self._engine.get_num_unfinished_requests()
            served.errors.append(f"{type(error).__name__}: {error}")
            raise
        for output in outputs:
            whole = output.finished and output.outputs[0].finish_reason == "length"
            served.answered += whole
            served.failed += output.finished and not whole
        if self._side is not None:
            served.waits.append(self._watch.take())


def _live(model: str, log: str, endpoint: str | None, line: Connection) -> None:
    output = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ.update(
        VLLM_ENABLE_V1_MULTIPROCESSING="0", VLLM_CPU_KVCACHE_SPACE="1", VLLM_PLUGINS="kvgraph",
        # One thread: on busy cores several wait for each other, and the sidecar needs a core too.
        VLLM_CPU_OMP_THREADS_BIND="nobind", OMP_NUM_THREADS="1",
        HF_HUB_OFFLINE="1", VLLM_NO_USAGE_STATS="1",
    )  # fmt: skip
    if endpoint is not None:
        os.environ.update(AITHER_KVCACHE_GRAPH="1", AITHER_KVCACHE_SIDECAR=endpoint)
    else:
        os.environ.pop("AITHER_KVCACHE_GRAPH", None)
    engine = _Engine(model)
    try:
        engine.listen(line)
    except EOFError:
        return
