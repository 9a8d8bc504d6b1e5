"""What would have made a request faster, what saves most first."""

from __future__ import annotations

from typing import Final

from ....dashboards.answers.misses import Remedy
from ....graph.logs.history import History
from ....graph.logs.reasons import Reason
from ...reasons.remedies import Missing, could_find_more, miss_remedy

_LITTLE: Final = 0.01  # share of a request's time that is not worth a sentence; chosen
_MOSTLY: Final = 0.5  # of a request's time: who spent so much on its answer is told; chosen
_ANSWER: Final = (
    "A shorter answer, or fewer requests beside it: most of its time went to its answer, and no "
    "cache shortens that."
)


def remedies(history: History, number: int, wait: Remedy | None) -> tuple[Remedy, ...]:
    """What would have helped with its wait, its prompt and its answer.

    Args:
        wait: What would have let it begin sooner; None where it hardly waited.
    """
    record = history.requests.record(number)
    ran, prompt_s = float(record["ran"]), prompt_seconds(history, number)
    all_s = float(record["waited"]) + max(0.0, ran) if ran == ran else None
    found = [(wait.saves_s or 0.0, wait)] if wait is not None else []
    if (prompt := _of_prompt(history, number, prompt_s)) is not None:
        found.append((prompt.saves_s or 0.0, prompt))
    if all_s is not None and prompt_s is not None and (rest := ran - prompt_s) > _MOSTLY * all_s:
        found.append((rest, Remedy(of="answer", saves_s=None, text=_ANSWER)))
    return _worth_telling([each for _, each in sorted(found, key=lambda f: -f[0])], all_s)


def prompt_seconds(history: History, number: int) -> float | None:
    """How long of a request's time its prompt took to compute; None where nobody can tell."""
    record = history.requests.record(number)
    rate = history.words(history.requests.names(number).engine).prefill_tokens_per_s
    if not rate or not float(record["ran"]) >= 0:  # NaN: it runs
        return None
    return min(float(record["ran"]), _computed(history, number) / rate)


def _computed(history: History, number: int) -> int:
    """Tokens of its prompt that were computed, those of its partial block among them."""
    record = history.requests.record(number)
    found = sum(int(record[name]) for name in ("pool", "loaded", "prefetched", "spliced"))
    return int(record["tokens"]) - found * int(record["size"])


def _of_prompt(history: History, number: int, prompt_s: float | None) -> Remedy | None:
    """What would have let it find more, and the seconds that it could have saved at most: those of
    what was computed again, or where nothing of it had been here, of all that was computed."""
    record, names = history.requests.record(number), history.requests.names(number)
    reason, detail = Reason(int(record["reason"])), int(record["detail"])
    pool, was_there = history.pool_blocks(names.engine), record["ago"] < record["waited"]
    missing = Missing(
        reason, detail, int(record["index"]), int(record["short"]), pool, bool(was_there),
        history.words(names.engine).copy_room,
    )  # fmt: skip
    text = miss_remedy(missing)
    if text is None:
        return None
    saves_s = prompt_s if could_find_more(reason, detail) else 0.0
    computed = _computed(history, number)
    if saves_s and record["again"] and computed:
        saves_s *= min(1.0, int(record["again"]) * int(record["size"]) / computed)
    return Remedy(of="prompt", saves_s=saves_s, text=text)


def _worth_telling(found: list[Remedy], all_s: float | None) -> tuple[Remedy, ...]:
    """Without those that save next to nothing, unless there are no others."""
    least = _LITTLE * (all_s or 0.0)
    worth = [each for each in found if each.saves_s is None or each.saves_s > least]
    return tuple(worth or found)
