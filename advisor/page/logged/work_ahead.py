"""What an engine computed while a request waited for its turn."""

from __future__ import annotations

from typing import Final

import numpy as np

from ....dashboards.answers.misses import Wait
from ....graph.logs.request_log import RequestLog
from ...reasons.wait_words import WorkAhead, wait_remedy, wait_sentence

_TOLD_S: Final = 0.05  # a shorter wait is nobody's question; chosen


def wait_of(log: RequestLog, number: int, pool: int) -> Wait | None:
    """What a request waited for; None where it hardly waited."""
    waited = float(log.record(number)["waited"])
    if waited < _TOLD_S:
        return None
    begun = log.ahead(number)
    ahead = begun if len(begun) else log.under_way(number)
    records = log.records(ahead)
    size = records["size"].astype(np.int64)
    found = sum(records[name] * size for name in ("pool", "loaded", "prefetched", "spliced"))
    computed = records["tokens"] - found
    tokens = int(computed.sum())
    most = int(computed.argmax()) if tokens else None
    largest = None if most is None else int(ahead[most])
    names = None if largest is None else log.names(largest)
    again = records["again"] > 0
    work = WorkAhead(
        prompts=len(begun),
        tokens=tokens,
        again=int((records["again"] * size).sum()),
        short=int(records["short"][again].max(initial=0)),
        pool=pool,
        who=None if names is None else names.session or names.request,
        most=0 if most is None else int(computed[most]),
    )
    hold = log.hold(number)
    return Wait(
        prompts=work.prompts,
        tokens=work.tokens,
        again=work.again,
        largest=largest,
        held_s=0.0 if hold is None else round(hold.seconds, 3),
        until=None if hold is None else hold.reason,
        sentence=wait_sentence(work, waited, hold),
        remedy=wait_remedy(work, waited, hold),
    )
