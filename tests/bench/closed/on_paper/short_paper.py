"""Short requests of a corpus that is larger than the pool and asked again and again, on paper.

Classifying and reranking look so. Contexts here belong to nobody who comes back: it is what the
hold is not made for.
"""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Iterator
from typing import TYPE_CHECKING, Final

from ...paper.paper_engine import BLOCK_SIZE
from ...recorded.agents_requests import AgentRequest
from ...serving.model import ModelShape
from ..closed_users import ClosedTurn
from .closed_paper_arms import PaperArm
from .paper_loop import PaperLoop, Sent
from .paper_service import PaperService

if TYPE_CHECKING:
    from vllm.config import VllmConfig

# All chosen: a corpus of two and a half pools, and a step whose fixed cost is that of 200 tokens.
_TEXTS: Final = 1200
_TEXT_TOKENS: Final = 8 * BLOCK_SIZE + 1
_BLOCKS: Final = 4000
_CLIENTS: Final = 128
_SERVICE: Final = PaperService(20_000.0, 0.0, 2048, step_s=0.01)
_WARM_S, _END_S = 30.0, 90.0


def short_answers(base: VllmConfig, arm: PaperArm) -> float:
    """Answers a second, of the service model's seconds."""
    loop = PaperLoop(base, arm, _BLOCKS, _Corpus(_CLIENTS), _SERVICE)
    try:
        loop.run(_END_S)
        return sum(each.ended_s >= _WARM_S for each in loop.answers) / (_END_S - _WARM_S)
    finally:
        loop.engine.close()


class _Corpus:
    """A crowd: whoever has an answer asks the next text, and all begin anew behind the last."""

    def __init__(self, clients: int) -> None:
        self._turns = itertools.cycle(_turn(number) for number in range(_TEXTS))
        self._due = deque((0.0, client) for client in range(clients))

    @property
    def next_s(self) -> float:
        return self._due[0][0] if self._due else math.inf

    def due(self, now: float) -> Iterator[Sent]:
        while self._due and self._due[0][0] <= now:
            at, client = self._due.popleft()
            yield Sent(client, next(self._turns), at)

    def answered(self, sent: Sent, now: float) -> None:
        self._due.append((now, sent.user))


def _turn(number: int) -> ClosedTurn:
    """A text of its own, and one token that says what it is."""
    text = random.Random(number).choices(range(3, ModelShape().vocab), k=_TEXT_TOKENS)
    request = AgentRequest(
        f"text-{number}", 0.0, f"text-{number}", tuple(text), (3,), False, None, None, ()
    )
    return ClosedTurn(request, True, 0.0)
