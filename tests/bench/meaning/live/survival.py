"""``identity_survival``: whether a long chat's system text stays in a full pool, nobody annotates.

Now and then others send more new text than the pool holds. The engine's own report of cached tokens
says what survived.
"""

from __future__ import annotations

import multiprocessing
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Final, NamedTuple

from ...serving.workload import BLOCK
from .chat_model import Words
from .chat_server import POOL, ask, said

if TYPE_CHECKING:
    from openai import OpenAI

_SYSTEM: Final = 8  # blocks of the system text
_OTHERS: Final = 60  # blocks of a prompt of another client
_SAID: Final = 8  # tokens that a turn brings, beside its answer
_ANSWER: Final = 4
_BURST_EVERY: Final = 10  # turns
_BURST: Final = -(-3 * POOL // (2 * _OTHERS))  # prompts: half as much again as the pool holds


class Survival(NamedTuple):
    """What one server's cache kept.

    Attributes:
        turns: Share of turns, of all but the first, that found the whole system text.
        bursts: The same of the turns behind others' prompts.
    """

    turns: float
    bursts: float


def survival(client: OpenAI, words: Words, turns: int) -> Survival:
    """Talk for so many turns; as the history grows, it never nears the end of the context."""
    messages = [said("system", words.text(_SYSTEM * BLOCK))]
    kept: list[bool] = []
    for turn in range(turns):
        if turn and turn % _BURST_EVERY == 0:
            burst(client, words)
        messages.append(said("user", words.text(_SAID)))
        reply = ask(client, messages, _ANSWER)
        messages.append(said("assistant", reply.text or "."))
        kept.append(reply.cached >= _SYSTEM * BLOCK)
    behind = kept[_BURST_EVERY::_BURST_EVERY]
    return Survival(sum(kept[1:]) / (turns - 1), sum(behind) / len(behind))


def burst(client: OpenAI, words: Words) -> None:
    """Others send half as much again as the pool holds."""
    for _ in range(_BURST):
        ask(client, [said("user", words.text(_OTHERS * BLOCK - 16))], 1)


@contextmanager
def busy_cores(count: int) -> Iterator[None]:
    """Processes that want a core each."""
    spinning = [multiprocessing.get_context("spawn").Process(target=_spin, daemon=True)
                for _ in range(count)]  # fmt: skip
    for each in spinning:
        each.start()
    try:
        yield
    finally:
        for each in spinning:
            each.kill()
            each.join()


def _spin() -> None:
    while True:
        pass
