"""Traffic that is no agents', on paper: what the hold is not made for, and must not slow down.

Texts of a corpus that is asked again and again (classifying, reranking), questions about shared
documents, several answers to one prompt, bursts. Nobody here goes on with what was answered.
"""

from __future__ import annotations

import heapq
import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
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

# All chosen; a step's fixed cost is that of 200 tokens.
_BLOCKS: Final = 4000
_SERVICE: Final = PaperService(20_000.0, 0.01, 2048, step_s=0.01)
_WARM_S, _END_S = 30.0, 90.0


@dataclass(frozen=True, slots=True)
class Traffic:
    """One kind of requests; sizes in tokens.

    Attributes:
        clients: Each asks again as soon as it is answered.
        texts: That are asked in turn, and anew behind the last.
        length: Of a text.
        answer: Of an answer.
        questions: Of a question behind each text, another one each time; 0: none.
        grows: By how much each text is longer than it was in the round before.
        together: Requests of one prompt, sent at once; the next follow the last answer.
        rest_s: Seconds from an answer to the client's next request.
    """

    name: str
    clients: int
    texts: int
    length: int
    answer: int = 1
    questions: int = 0
    grows: int = 0
    together: int = 1
    rest_s: float = 0.0


OTHERS: Final = (
    Traffic("short", clients=128, texts=1200, length=8 * BLOCK_SIZE + 1),
    Traffic("long", clients=64, texts=250, length=40 * BLOCK_SIZE + 1, answer=8),
    Traffic("documents", clients=64, texts=120, length=60 * BLOCK_SIZE, answer=20, questions=40),
    Traffic("siblings", clients=12, texts=200, length=40 * BLOCK_SIZE, answer=30, together=8),
    Traffic("growing", clients=128, texts=240, length=40 * BLOCK_SIZE, answer=4, grows=BLOCK_SIZE),
    Traffic("bursts", clients=100, texts=300, length=30 * BLOCK_SIZE, answer=8, rest_s=10.0),
)
"""Of each, the texts take from one and a half to three pools. Chosen."""


def answers_per_s(base: VllmConfig, arm: PaperArm, traffic: Traffic) -> float:
    """Answers a second, of the service model's seconds."""
    loop = PaperLoop(base, arm, _BLOCKS, _Clients(traffic), _SERVICE)
    try:
        loop.run(_END_S)
        return sum(each.ended_s >= _WARM_S for each in loop.answers) / (_END_S - _WARM_S)
    finally:
        loop.engine.close()


class _Clients:
    """A crowd: whoever has all answers to a prompt asks the next text."""

    def __init__(self, traffic: Traffic) -> None:
        self._traffic = traffic
        self._asked = 0
        self._open = [0] * traffic.clients  # answers that each waits for
        self._due = [(0.0, client) for client in range(traffic.clients)]

    @property
    def next_s(self) -> float:
        return self._due[0][0] if self._due else math.inf

    def due(self, now: float) -> Iterator[Sent]:
        while self._due and self._due[0][0] <= now:
            at, client = heapq.heappop(self._due)
            turn = self._next()
            self._open[client] = self._traffic.together
            for _ in range(self._traffic.together):
                yield Sent(client, turn, at)

    def answered(self, sent: Sent, now: float) -> None:
        self._open[sent.user] -= 1
        if not self._open[sent.user]:
            heapq.heappush(self._due, (now + self._traffic.rest_s, sent.user))

    def _next(self) -> ClosedTurn:
        traffic, number = self._traffic, self._asked
        self._asked += 1
        name = f"{traffic.name}-{number}"
        prompt = (*self._text(number), *_tokens(name, traffic.questions))
        answer = _tokens(f"answer {number}", traffic.answer)
        request = AgentRequest(name, 0.0, name, prompt, tuple(answer), False, None, None, ())
        return ClosedTurn(request, True, 0.0)

    def _text(self, number: int) -> Iterator[int]:
        traffic, (again, text) = self._traffic, divmod(number, self._traffic.texts)
        yield from _tokens(f"text {text}", traffic.length)
        for each in range(again):
            yield from _tokens(f"more {text} {each}", traffic.grows)


def _tokens(seed: str, count: int) -> Sequence[int]:
    return random.Random(seed).choices(range(3, ModelShape().vocab), k=count)
