"""`kvgraph prior`: learns the lifecycle policy's prior from recorded sessions."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from itertools import zip_longest
from pathlib import Path
from typing import Annotated, Final

import numpy as np
import typer
from rich.console import Console
from threadpoolctl import threadpool_limits

from ...graph.tables.sessions import SessionTable
from ...graph.types import NO_ROW
from ..policies.hazard import OLDEST, Batch, Cohort, Features, ReturnModel
from ..policies.lifecycle import Prior, packed
from ..policies.waits import STATED_FEATURE, STOP_FEATURES, features
from .cli import check_writable
from .reader import whole_file
from .recorded_sessions import RecordedTurn, Session, read_sessions
from .trace import TraceError

STEPS: Final = 4000  # learning steps; more overfit the recorded sessions (tried on held-out halves)

_STRIDE: Final = 20  # chosen
_LONGEST_S: Final = 1800.0  # pauses are cut to this many seconds, as in fleets; chosen
_FACTOR: Final = 4.0  # factor by which a caller's statement of a pause may be wrong; chosen
_STEP: Final = 4e-3  # initial step of Adam; it falls to 0 along a cosine; chosen
_PULL: Final = 300.0  # pull towards zero weights, in waits; chosen


def learn_prior(
    sessions: Sequence[Session],
    *,
    steps: int = STEPS,
    seed: int = 0,
    progress: Callable[[int], None] = lambda steps: None,
) -> Prior:
    """Learn a prior from these sessions; deterministic.

    Raises TraceError: no session returns.

    Each session is used as three kinds of callers would show it: one that states nothing, one that
    states why answers ended, and one that also states roughly how long a tool will take.
    """
    whole = recorded_waits(sessions, seed)
    if not whole.returned.any():
        raise TraceError("no session has a second turn, so nothing tells when sessions return")
    blind = np.array(whole.features)
    blind[:, [*STOP_FEATURES, STATED_FEATURE]] = np.nan
    stops = np.array(whole.features)
    stops[:, STATED_FEATURE] = np.nan
    known = np.concatenate([blind, stops, whole.features])
    age, returned, weight = whole.age, whole.returned, whole.weight
    cohort = Cohort(known.__getitem__, np.tile(age, 3), np.tile(returned, 3), np.tile(weight, 3))
    model = ReturnModel(_scales(known), step=_STEP, pull=_PULL)
    for done in range(0, steps, _STRIDE):
        warm = min(1.0, (done + _STRIDE) / (0.2 * steps))
        model.step = _STEP * warm * 0.5 * (1 + np.cos(np.pi * done / steps))
        model.learn(cohort, min(_STRIDE, steps - done))
        progress(done)
    pauses = np.log(np.maximum(whole.age[whole.returned], 0.01))
    return Prior(model.scales, model.weights, float(pauses.mean()))


def _scales(known: Features) -> Features:
    """float32 ``[2, features]``: mean and spread; 0 and 1 of features that are never known."""
    told = ~np.isnan(known).all(axis=0)
    scales = np.stack([np.zeros(known.shape[1]), np.ones(known.shape[1])])
    scales[0, told] = np.nanmean(known[:, told], axis=0)
    scales[1, told] = np.nanstd(known[:, told], axis=0) + 1e-6
    return scales.astype(np.float32)


def recorded_waits(sessions: Sequence[Session], seed: int = 0) -> Batch:
    rng = np.random.default_rng(seed)
    known: list[Features] = []
    ages: list[float] = []
    for session in sessions:
        for thread in _threads(session.turns):
            for found, lasted in _waits(thread, rng):
                known.append(found)
                ages.append(lasted)
    age = np.array(ages)
    return Batch(np.concatenate(known), age, age < OLDEST, np.ones(len(age)))


def _threads(turns: Sequence[RecordedTurn]) -> list[list[RecordedTurn]]:
    """Split a session's turns by the context that they extend."""
    # A turn that keeps at most half of every context before it (because it was compacted, or began
    # anew) begins a new thread: no turn comes back to the blocks of the other.
    threads: list[list[RecordedTurn]] = []
    for turn in turns:
        kept = [(_common(each[-1].hash_ids, turn.hash_ids), each) for each in threads]
        most, thread = max(kept, key=lambda pair: pair[0], default=(0, []))
        if not thread or 2 * most <= len(thread[-1].hash_ids):
            threads.append(thread := [])
        thread.append(turn)
    return threads


def _common(one: array[int], other: array[int]) -> int:
    """Return how many numbers two chains share; a number stands for its whole prefix."""
    last = min(len(one), len(other))
    return bisect_left(range(last), True, key=lambda at: one[at] != other[at])


def _waits(
    thread: Sequence[RecordedTurn], rng: np.random.Generator
) -> Iterator[tuple[Features, float]]:
    """Return what is known at the end of each turn, and how many seconds the session then waits."""
    table = SessionTable(1)
    row = table.ensure("thread", NO_ROW, 0.0)
    rows = np.array([row])
    now = 0.0
    for turn, after in zip_longest(thread, thread[1:]):
        pause = OLDEST if after is None else min(after.at - turn.at, _LONGEST_S)
        table.begin_turn(row, 0, now, turn.input_tokens)
        table.end_turn(row, NO_ROW, now, turn.input_tokens, turn.input_tokens + turn.output_tokens)
        if turn.stop == "tool_use":
            said = pause * _FACTOR ** rng.uniform(-1, 1)
            table.wait(row, now + said if after else np.nan)
        elif turn.stop:
            table.rest(row)
        yield features(table, rows), pause
        now += pause


def prior(
    sessions: Annotated[Path, typer.Argument(help="Recorded sessions: a file or a directory.")],
    out: Annotated[Path, typer.Option("--out", "-o", help="The .npz file to write or replace.")],
    seed: Annotated[int, typer.Option(help="Seed of callers' guesses of tools' pauses.")] = 0,
) -> None:
    """Learn from recorded sessions when sessions return: where the lifecycle policy starts from."""
    check_writable("--out", out, replaced=True)  # learning takes minutes
    with Console(stderr=True).status("reading sessions") as status:
        found = read_sessions(
            sessions, progress=lambda files: status.update(f"reading sessions: {files}")
        )
        with threadpool_limits(1, user_api="blas"):
            learned = learn_prior(
                found,
                seed=seed,
                progress=lambda steps: status.update(f"learning: step {steps:,} of {STEPS:,}"),
            )
    with whole_file(out) as file:  # given a name, numpy may add to it
        np.savez_compressed(file, allow_pickle=False, **packed(learned))
    typer.echo(f"learned from {len(found):,} sessions, written to {out}", err=True)
