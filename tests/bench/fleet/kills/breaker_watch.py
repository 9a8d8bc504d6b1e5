"""How long anybody waits for a store whose master was killed."""

from __future__ import annotations

import subprocess
import time
from dataclasses import dataclass
from itertools import count
from typing import Final

from kvgraph.hooks.store.stores import MooncakeStore
from kvgraph.hooks.vllm.tiers.sharing import StoreLookup

_TICK_S: Final = 0.01  # between two requests that ask; chosen
_WATCHED_S: Final = 4.0  # less than the first call blocks
_CALM_S: Final = 0.5  # of questions that are answered before the kill; chosen
_NAME: Final = "model"


@dataclass(frozen=True, slots=True)
class Waits:
    """What requests waited for: the longest time for the store's word, how many waited, of
    ``asked``, and how long asking kept the engine's thread at most.
    """

    longest_s: float
    requests: int
    asked: int
    step_s: float


def waits_after_kill(store: MooncakeStore, master: subprocess.Popen[bytes]) -> Waits:
    """Kill the master while requests come, each of which asks the store for its prompt."""
    lookup = StoreLookup(store, time.monotonic)
    lookup.names = [_NAME]
    _ask_for(lookup, _CALM_S)
    master.kill()
    master.wait()
    return _ask_for(lookup, _WATCHED_S)


def _ask_for(lookup: StoreLookup, seconds: float) -> Waits:
    longest = step_s = 0.0
    waiting: dict[str, None] = {}
    numbers, waited = count(), set[str]()
    begin = now = since = time.monotonic()
    while now < begin + seconds:
        name = f"{begin} {next(numbers)}"
        lookup.ask(name, [name.encode()])
        waiting[name] = None
        for each in [each for each in waiting if not lookup.waits(each)]:
            del waiting[each]
            lookup.forget(each)
        step_s = max(step_s, time.monotonic() - now)
        time.sleep(_TICK_S)
        since, now = since if waiting else now, time.monotonic()
        waited.update(waiting)
        longest = max(longest, now - since if waiting else 0.0)
    return Waits(longest, len(waited), next(numbers), step_s)
