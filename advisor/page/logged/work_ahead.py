"""What an engine computed while a request waited for its turn."""

from __future__ import annotations

from typing import Final, NamedTuple

import numpy as np
import numpy.typing as npt

from ....dashboards.answers.misses import Remedy, Wait
from ....graph.logs.history import History
from ....graph.logs.request_facts import Hold
from ....graph.logs.request_log import RequestLog
from ...reasons.wait_words import WorkAhead, wait_remedy, wait_sentence

_TOLD_S: Final = 0.05  # a shorter wait is nobody's question; chosen


class Waited(NamedTuple):
    """What a request waited for, and what would have let it begin sooner."""

    wait: Wait
    remedy: Remedy


def wait_of(history: History, number: int) -> Waited | None:
    """Why a request waited; None where it hardly did."""
    log = history.requests
    waited = float(log.record(number)["waited"])
    if waited < _TOLD_S:
        return None
    hold, begun, running = log.hold(number), log.ahead(number), log.under_way(number)
    ahead = begun if len(begun) else running[-1:]
    records = log.records(ahead)
    size = records["size"].astype(np.int64)
    found = sum(records[name] * size for name in ("pool", "loaded", "prefetched", "spliced"))
    computed = records["tokens"] - found
    tokens = int(computed.sum())
    most = int(computed.argmax()) if tokens else None
    largest = None if most is None else int(ahead[most])
    again, engine = records["again"] > 0, log.names(number).engine
    work = WorkAhead(
        queued_s=waited if hold is None else max(0.0, waited - hold.seconds),
        running=len(running),
        freed_s=_freed_after(log, number, running),
        runner=_whose(log, int(running[-1])) if len(running) else None,
        prompts=len(begun),
        tokens=tokens,
        again=int((records["again"] * size).sum()),
        short=int(records["short"][again].max(initial=0)),
        pool=history.pool_blocks(engine),
        copies=history.words(engine).copy_room,
        rate=history.words(engine).prefill_tokens_per_s,
        who=None if largest is None else _whose(log, largest),
        most=0 if most is None else int(computed[most]),
    )
    text, saves_s = wait_remedy(work, hold)
    return Waited(_told(work, hold, largest), Remedy(of="wait", saves_s=saves_s, text=text))


def _told(work: WorkAhead, hold: Hold | None, largest: int | None) -> Wait:
    return Wait(
        prompts=work.prompts,
        tokens=work.tokens,
        again=work.again,
        largest=largest,
        held_s=0.0 if hold is None else round(hold.seconds, 3),
        until=None if hold is None else hold.reason,
        sentence=wait_sentence(work, hold).rstrip(),
    )


def _freed_after(log: RequestLog, number: int, running: npt.NDArray[np.int64]) -> float | None:
    """Seconds from a request's arrival until the first of those that ran then ended; None: none had
    when it began."""
    record, ran = log.record(number), log.records(running)
    ends = ran["at"] + ran["ran"]
    in_time = ends[ends <= record["at"]]  # NaN: it runs
    if not len(in_time):
        return None
    return max(0.0, float(in_time.min() - record["at"]) + float(record["waited"]))


def _whose(log: RequestLog, number: int) -> str:
    names = log.names(number)
    return names.session or names.request
