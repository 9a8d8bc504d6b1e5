"""What a step of vLLM's own scheduler costs with us, beside an empty connector: arms in turns.

Scheduler, cache manager and pool are vLLM's, the connector is ours, and the graph that advises it
runs in the same process, between steps; only the model is missing. One process and arms in turns
resolve two or three percent where two processes resolve fifteen.
"""

from __future__ import annotations

import copy
import gc
import itertools
import json
import os
import pickle
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final
from unittest.mock import patch

import numpy as np
from kvgraph.graph.wire import frames
from kvgraph.hooks.link.mailbox import looked_up
from kvgraph.hooks.requests.hints import KEY, HintTrust
from kvgraph.hooks.settings import CORE_VARIABLE, HINTS_VARIABLE, PYTHON
from kvgraph.hooks.vllm.core_choice import reason_against

from ..figures import Figures
from ..hotpath import a_ranking, cached_pool, connected, dependencies
from ..paper import paper_engine
from ..paper.paper_engine import Shape
from ..serving.model import TINY, ensure_model
from .step_figures import APPLY_POOL, BATCHED_TOKENS, BETWEEN_SESSIONS_S, REQUESTS, Clock
from .step_loop import Load, StepLoop, StepSidecar

EMPTY: Final = "empty"
OUTPUT_TOKENS: Final = 64
PROMPT_TOKENS: Final = 1024  # on average, of one turn; it grows, and begins anew
ROUNDS: Final = 16
STEPS: Final = 40  # of an arm, before the next one's turn
_STEP_S: Final = 0.03  # on the engines' clock
_LONGEST: Final = 4096
_TOKENS: Final = 500  # of the vocabulary


_MESSAGES: Final = 60  # of a request whose caller states the layer of each
_RULES: Final = 128  # tokens that begin the prompts of such callers


@dataclass(frozen=True, slots=True)
class Busy:
    """How busy the engine is: requests that run, blocks of its pool, and whether each request says
    everything: its session, its layers, and that a tool follows.
    """

    running: int
    pool: int
    is_told: bool = False


BUSY: Final = (Busy(8, 2_000), Busy(32, 4_000), Busy(128, 16_000), Busy(32, 4_000, is_told=True))
_TARGETS: Final = {8: "≤ 1.05", 32: "≤ 1.03", 128: "≤ 1.015"}
_TARGETS_TIERS: Final = {8: "≤ 1.12", 32: "≤ 1.06", 128: "≤ 1.04"}


def add_scheduler_steps(
    figures: Figures, say: Callable[[str], None], busy: Sequence[Busy] = BUSY, rounds: int = ROUNDS
) -> None:
    from vllm.config import VllmConfig  # noqa: F401 - loads what the arms need, untimed

    for each in busy:
        told = "_told" * each.is_told
        say(f"vLLM's scheduler, {each.running} running{', told all' * each.is_told}, arms in turns")
        took = measure_arms(each, _arms(), rounds)
        empty = np.array(took.pop(EMPTY))
        figures.add(f"engine_step_us_{each.running}{told}_{EMPTY}", empty.tolist(), "us")
        for name, samples in took.items():
            tiers = name.startswith("tiers")
            suffix = f"{told}{'_tiers' * tiers}{'_python' * name.endswith(PYTHON)}"
            target = (_TARGETS_TIERS if tiers else _TARGETS)[each.running]
            ratios = (np.array(samples) / empty).tolist()
            name = f"engine_step_ratio_{each.running}{suffix}"
            has_target = not (told or name.endswith(PYTHON))
            figures.add(name, ratios, "ratio", target if has_target else "")


def measure_arms(busy: Busy, arms: Sequence[str], rounds: int = ROUNDS) -> dict[str, list[float]]:
    """Microseconds a step of each arm, one sample a round.

    Between two steps of any arm another advised engine takes one: else the graph, which runs in
    this process, would leave its data in the caches before our steps only.
    """
    base = _base_config(busy)
    engines = {name: _Engine(base, busy, name) for name in arms}
    other = _Engine(base, busy, next(name for name in arms if name != EMPTY))
    per_request = busy.pool * paper_engine.BLOCK_SIZE // (PROMPT_TOKENS // 6 + OUTPUT_TOKENS)
    warm = int(1.3 * per_request * OUTPUT_TOKENS / busy.running) + 3 * OUTPUT_TOKENS
    for engine in engines.values():
        for _ in range(min(warm, 4_000)):
            engine.step()
            engine.rest()
    for _ in range(min(warm, 4_000)):
        other.step()
        other.rest()
    took: dict[str, list[float]] = {name: [] for name in arms}
    gc.collect()
    gc.freeze()  # as the engine core does
    for number in range(rounds):
        first = number % len(arms)
        for name in (*arms[first:], *arms[:first]):
            seconds = 0.0
            for _ in range(STEPS):
                seconds += engines[name].step()
                engines[name].rest()
                other.step()
                other.rest()
            took[name].append(seconds / STEPS * 1e6)
    gc.unfreeze()
    return took


def _arms() -> list[str]:
    """An empty connector, and each core without and with tiers."""
    python = [f"observed {PYTHON}", f"tiers {PYTHON}"]
    if reason_against() is not None:
        return [EMPTY, *python]
    return [EMPTY, "observed compiled", "tiers compiled", *python]


def _base_config(busy: Busy) -> Any:
    from vllm.engine.arg_utils import EngineArgs

    arguments = EngineArgs(
        model=str(ensure_model(TINY)), dtype="float32", block_size=paper_engine.BLOCK_SIZE,
        max_model_len=_LONGEST, max_num_seqs=max(busy.running, 8),
        max_num_batched_tokens=2048 if busy.running <= 64 else 16_384, enforce_eager=True,
    )  # fmt: skip
    return arguments.create_engine_config()


class _Engine:
    """vLLM's scheduler with one arm's connector, under traffic that all arms get alike."""

    def __init__(self, base: Any, busy: Busy, arm: str) -> None:
        from vllm.v1.structured_output import StructuredOutputManager

        self._busy, self._tiers = busy, arm.startswith("tiers")
        shape = Shape(blocks=busy.pool, stock=arm == EMPTY, warm=busy.pool if self._tiers else None)
        config = paper_engine.configured(base, shape, "")
        if arm == EMPTY:
            config = _with_empty_connector(config)
        scheduler = config.scheduler_config.get_scheduler_cls()
        self._scheduler = scheduler(
            config, paper_engine.cache_of(shape), StructuredOutputManager(config),
            paper_engine.BLOCK_SIZE, log_stats=True,
        )  # fmt: skip
        self._clock, self._sidecar = Clock(), None
        if arm != EMPTY:
            core = PYTHON if arm.endswith(PYTHON) else ""
            with patch.dict(os.environ, {CORE_VARIABLE: core, HINTS_VARIABLE: HintTrust.ALL.value}):
                self._sidecar = self._attached()
        self._make, self._numbers = paper_engine.request_maker(), itertools.count()
        self._alive, self._prompts = 0, dict[int, list[int]]()

    def step(self) -> float:
        """Seconds that vLLM's engine core spends on one step, without a model."""
        scheduler = self._scheduler
        new = [self._next() for _ in range(self._busy.running - self._alive)]
        began = time.thread_time()
        for request in new:
            scheduler.add_request(request)
        output = scheduler.schedule()
        pickle.dumps(output, protocol=5)  # as it goes to the workers
        scheduled = time.thread_time() - began
        answer = self._answer(output)
        began = time.thread_time()
        scheduler.update_from_output(output, answer)
        took = scheduled + time.thread_time() - began
        self._alive = len(scheduler.requests)
        return took

    def rest(self) -> None:
        """What runs between two steps: in a live engine that leaves nobody's data in the caches."""
        _OTHERS_DATA.sum()
        json.loads(_OTHERS_WORDS)
        self._clock.now += _STEP_S
        if self._sidecar is not None:
            self._sidecar.hear()

    def _attached(self) -> StepSidecar:
        from kvgraph.hooks.tiers.jobs import TierAnswer, WorkerStart
        from kvgraph.hooks.vllm.patches import bind_scheduler

        connector = self._scheduler.connector
        pool = self._scheduler.kv_cache_manager.block_pool
        side = connector.attach(pool, dependencies(self._clock))
        bind_scheduler(self._scheduler)
        if self._tiers:
            side.bridge.answered(TierAnswer(starts=(WorkerStart(self._busy.pool),)))
            side.bridge.ledger.costs.worth_loading = lambda *_: True
        return StepSidecar(side, self._clock)

    def _next(self) -> Any:
        """The next turn of one of some sessions: its prompt goes on, until it begins anew."""
        number = next(self._numbers)
        session, rng = number % (4 * self._busy.running), random.Random(number)
        prompt = self._prompts.get(session, [])
        if not prompt or len(prompt) > 2 * PROMPT_TOKENS:
            prompt = list(range(9, 9 + _RULES)) if self._busy.is_told else []
            prompt += [rng.randrange(9, _TOKENS) for _ in range(PROMPT_TOKENS // 2 - len(prompt))]
        prompt = prompt + [rng.randrange(9, _TOKENS) for _ in range(PROMPT_TOKENS // 6)]
        self._prompts[session] = prompt
        said = _everything(session, len(prompt)) if self._busy.is_told else None
        return self._make(f"r{number}", prompt, OUTPUT_TOKENS, kv_transfer_params=said)

    def _answer(self, output: Any) -> Any:
        """What a model and workers would say to a step."""
        from vllm.v1.outputs import ModelRunnerOutput

        names, requests = list(output.num_scheduled_tokens), self._scheduler.requests
        said = [
            [9 + requests[name].num_tokens % 300]
            if requests[name].num_computed_tokens >= requests[name].num_prompt_tokens
            else []
            for name in names
        ]
        return ModelRunnerOutput(
            req_ids=names, req_id_to_index={name: at for at, name in enumerate(names)},
            sampled_token_ids=said, logprobs=None, prompt_logprobs_dict={}, pooler_output=[],
            kv_connector_output=self._moved(output) if self._tiers else None,
        )  # fmt: skip

    def _moved(self, output: Any) -> Any:
        """All that the workers were told to move, done at once."""
        from kvgraph.hooks.tiers.jobs import JobDone, Load, TierAnswer
        from kvgraph.hooks.vllm.tiers.worker import TierMetadata, TierWorkerMetadata
        from vllm.v1.outputs import KVConnectorOutput

        metadata = output.kv_connector_metadata
        jobs = metadata.work.jobs if isinstance(metadata, TierMetadata) else ()
        done = tuple(JobDone(job.id, frozenset(), 0.001, 1) for job in jobs)
        loaded = {job.request for job in jobs if isinstance(job, Load) and job.request}
        return KVConnectorOutput(
            finished_recving=loaded or None,
            kv_connector_worker_meta=TierWorkerMetadata(TierAnswer(done)) if done else None,
        )


def _everything(session: int, tokens: int) -> dict[str, Any]:
    """What the caller of one turn says who says everything."""
    layers = itertools.cycle(("user_turn", "generation", "tool_result"))
    starts = [_RULES + (tokens - _RULES) * at // _MESSAGES for at in range(_MESSAGES + 1)]
    segments = [{"layer": "rules", "start": 0, "end": _RULES}] + [
        {"layer": layer, "start": start, "end": end}
        for layer, (start, end) in zip(layers, itertools.pairwise(starts), strict=False)
    ]
    told = {"session": f"s{session}", "segments": segments, "waiting_for_tool": True}
    return {KEY: told}


def _with_empty_connector(config: Any) -> Any:
    from vllm.config import KVTransferConfig

    made = copy.copy(config)
    made.kv_transfer_config = KVTransferConfig(
        kv_connector="EmptyConnector", kv_role="kv_both",
        kv_connector_module_path="kvgraph_bench.steps.empty_connector",
    )  # fmt: skip
    made.kv_transfer_config.kv_role = None  # as ours: only the scheduler has one
    return made


_OTHERS_DATA: Final = np.ones(1 << 19)
_OTHERS_WORDS: Final = json.dumps([{"a": at, "b": [str(at)] * 3} for at in range(300)])


_LOADS: Final = (Load(8, 8_000), Load(32, 8_000), Load(256, 30_000))
_STEPS: Final = 280
_TICK_S: Final = 0.2  # between two sendings, as the client has it
_RANKED: Final = 8_192
_REPEATS: Final = 25


def add_client(figures: Figures, say: Callable[[str], None]) -> None:
    """Add microseconds a step of the client's thread, and milliseconds that a ranking takes it."""
    compiled = reason_against() is None
    for load in _LOADS:
        say(f"the client's thread beside {load.running} requests")
        for core in ("", PYTHON) if compiled else (PYTHON,):
            name = f"client_us_per_step_{load.running}{f'_{core}' * (bool(core) and compiled)}"
            figures.add(name, measure_client(load, core), "us")
    say("a ranking of 8,192 keys taken in, in a pool of 100,000")
    figures.add("take_ranking_ms", measure_taking(compiled), "ms", "≤ 0.3")
    if compiled:
        figures.add("take_ranking_ms_python", measure_taking(compiled=False), "ms")


def measure_client(load: Load, core: str, steps: int = _STEPS) -> list[float]:
    """Microseconds a step of this thread that events and their frames take, one sample a tick."""
    clock = Clock()
    with patch.dict(os.environ, {CORE_VARIABLE: core}):
        loop = StepLoop(load, lambda pool: connected(pool, None, clock, BATCHED_TOKENS, REQUESTS))
    sidecar = StepSidecar(loop.connector.side, clock)
    outbox = loop.connector.side.client.outbox
    took: list[float] = []
    take = outbox.take_all

    def timed() -> Any:
        began = time.thread_time()
        events = take()
        frames.encode_events(0, events)
        took.append(time.thread_time() - began)
        return events

    def settled() -> None:
        clock.now += BETWEEN_SESSIONS_S
        sidecar.hear()

    loop.fill(settled)
    outbox.take_all = timed
    every = max(1, round(_TICK_S / load.step_s))
    for number in range(1, steps + 1):
        loop.prepare()
        loop.step()
        clock.now += load.step_s
        if number % every == 0:
            sidecar.hear()
    return [seconds / every * 1e6 for seconds in took]


def measure_taking(compiled: bool) -> list[float]:
    """Milliseconds of the client's thread from a ranking to the blocks that it names."""
    _, keys, index = cached_pool(APPLY_POOL, compiled=compiled)
    shuffled, took = np.random.default_rng(1), []
    for epoch in range(1, _REPEATS + 1):
        order = shuffled.permutation(keys)[:_RANKED]
        ranking = a_ranking(order[256:], epoch, protected=order[:256])
        began = time.thread_time()
        looked_up(ranking, index.holders, copies=False)
        took.append((time.thread_time() - began) * 1e3)
    return took
