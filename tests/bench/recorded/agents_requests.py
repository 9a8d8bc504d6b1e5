"""Requests of recorded agents, as they are sent to a real engine."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from enum import IntEnum
from pathlib import Path
from typing import Any, Final

from kvgraph.advisor.replay.fleet_traffic import (
    BlockNumbers,
    FleetRequest,
    lay_over_users,
    layers,
    rough_return_s,
    waiting_for_tool,
    write_trace,
)
from kvgraph.advisor.replay.reader import HEADER_VERSION, load_trace
from kvgraph.advisor.replay.recorded_sessions import read_sessions
from kvgraph.advisor.replay.trace import Trace

from ..errors import TrafficError
from ..serving.workload import BLOCK
from .agents_forcing import ANSWER


class Kind(IntEnum):
    HEAD = 0
    USER = 1
    TOOL = 2
    ANSWER = 3


ROOT: Final = -1  # the number of the empty prefix


class TokenWriter:
    """Gives recorded blocks their tokens; the same calls in the same order give the same ones."""

    def __init__(self, vocabulary: int, seed: int) -> None:
        self._first, self._quarter = _bands(vocabulary)
        self._seed = seed
        self._tokens: dict[int, int] = {}
        self._taken: dict[int, set[int]] = {}  # prefix → tokens that stand behind it

    def token(self, number: int, before: int, kind: Kind) -> int:
        """The token of block ``number``, which follows the prefix that ends with ``before``."""
        found = self._tokens.get(number)
        if found is None:
            found = self._tokens[number] = self._new(number, before, kind)
        return found

    def _new(self, number: int, before: int, kind: Kind) -> int:
        taken = self._taken.setdefault(before, set())
        raw = hashlib.blake2b(f"{self._seed}/{number}".encode(), digest_size=8).digest()
        drawn = int.from_bytes(raw, "little")
        start = self._first + kind * self._quarter
        for step in range(self._quarter):
            token = start + (drawn + step) % self._quarter
            if token not in taken:
                taken.add(token)
                return token
        raise TrafficError(
            f"more than {self._quarter} texts part at one place: a model with a larger vocabulary, "
            "fewer users or fewer requests would do"
        )


def kind_of(token: int, vocabulary: int) -> Kind:
    first, quarter = _bands(vocabulary)
    return Kind((token - first) // quarter)


def endings(vocabulary: int) -> tuple[int, int]:
    """The tokens with which an answer ends that calls a tool, and one that ends its turn."""
    return vocabulary - 2, vocabulary - 1


def _bands(vocabulary: int) -> tuple[int, int]:
    """The first token that texts use, and how many each kind has."""
    first = vocabulary // 8
    return first, (vocabulary * 7 // 8 - first) // len(Kind)


SHRINK: Final = 64
"""Recorded tokens that one token of the engine stands for: the size of a recorded block."""

Layers = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class AgentRequest:
    name: str  # names the request across arms
    at: float  # recorded seconds since the fleet began
    session: str  # the name of this playing of a recorded session
    prompt: tuple[int, ...]  # token ids
    answer: tuple[int, ...]  # the token ids that the server is made to say; the last one ends it
    ended: bool  # whether the session never comes back
    waiting: bool | None  # whether the answer called a tool; None: nobody knows
    returns_s: float | None  # roughly how many recorded seconds the tool takes; None: nobody knows
    layers: Layers  # ``(source layer, first token, end token)`` of the prompt's head

    def body(self, pace: float, hinted: bool, layered: bool = False) -> dict[str, Any]:
        body: dict[str, Any] = {
            "model": "demo",
            "prompt": list(self.prompt),
            "max_tokens": len(self.answer),
            "temperature": 0.0,
            "ignore_eos": True,
            "stop_token_ids": [self.answer[-1]],
            "stream": True,
            "stream_options": {"include_usage": True},
            "vllm_xargs": {ANSWER: list(self.answer)},
        }
        said = {**(self._signals(pace) if hinted else {}), **(self._segments() if layered else {})}
        if said:
            body["kv_transfer_params"] = {"kvgraph": said}
        if hinted:
            body["session_id"] = self.session
        return body

    def _signals(self, pace: float) -> dict[str, Any]:
        """What an agent's harness knows when an answer is over."""
        said: dict[str, Any] = {"session": self.session}
        if self.ended:
            said["session_ended"] = True
        elif self.waiting is not None:
            said["waiting_for_tool"] = self.waiting
        if self.waiting and self.returns_s is not None:
            said["expected_return_s"] = round(pace * self.returns_s, 3)
        return said

    def _segments(self) -> dict[str, Any]:
        parts = [{"layer": name, "start": a, "end": b} for name, a, b in self.layers]
        return {"segments": parts} if parts else {}


def build_requests(
    fleet: Sequence[FleetRequest], vocabulary: int, seed: int
) -> tuple[AgentRequest, ...]:
    """The requests of a fleet; the same arguments give the same ones."""
    scribe = _Scribe(vocabulary, seed)
    return tuple(scribe.request(each, seed) for each in fleet)


class _Scribe:
    def __init__(self, vocabulary: int, seed: int) -> None:
        self._numbers = BlockNumbers(SHRINK)
        self._writer = TokenWriter(vocabulary, seed)
        self._tool_call, self._turn_end = endings(vocabulary)
        self._unheard = ROOT  # numbers of answers that no prompt contains run down from here

    def request(self, request: FleetRequest, seed: int) -> AgentRequest:
        numbers = self._numbers.prompt(request)
        prompt = self._tokens(request, numbers, 0, self._kind(request))
        after = self._answer_numbers(request, numbers)
        answer = self._tokens(request, [*numbers, *after], len(numbers), Kind.ANSWER)
        end = self._tool_call if waiting_for_tool(request) else self._turn_end
        return AgentRequest(
            name=f"{request.run}/{request.index}",
            at=request.at,
            session=request.run,
            prompt=prompt,
            answer=(*answer, end),
            ended=request.next_turn is None,
            waiting=waiting_for_tool(request),
            returns_s=rough_return_s(request, seed),
            layers=tuple(_shrunk(layers(request), len(prompt))),
        )

    def _tokens(
        self, request: FleetRequest, numbers: Sequence[int], first: int, kind: Kind
    ) -> tuple[int, ...]:
        """The tokens of ``numbers[first:]``: in the head the head's, behind it of ``kind``."""
        session = request.session
        head = (session.tool_tokens + session.system_tokens) // SHRINK
        return tuple(
            self._writer.token(
                numbers[place],
                numbers[place - 1] if place else ROOT,
                Kind.HEAD if place < head else kind,
            )
            for place in range(first, len(numbers))
        )

    def _kind(self, request: FleetRequest) -> Kind:
        """What came in since the turn before; what was there already keeps its tokens."""
        return Kind.TOOL if "tool_result" in request.turn.input_types else Kind.USER

    def _answer_numbers(self, request: FleetRequest, prompt: list[int]) -> list[int]:
        total = (request.turn.input_tokens + request.turn.output_tokens) // SHRINK
        wanted = total - len(prompt)
        if request.next_turn is not None:
            following = self._numbers.prompt(replace(request, index=request.index + 1))
            if len(following) >= total and following[: len(prompt)] == prompt:
                return following[len(prompt) : total]
        self._unheard -= wanted
        return list(range(self._unheard + wanted - 1, self._unheard - 1, -1))


def _shrunk(parts: Sequence[tuple[str, int, int]], limit: int) -> list[tuple[str, int, int]]:
    found = [(name, a // SHRINK, min(b // SHRINK, limit)) for name, a, b in parts]
    return [part for part in found if part[1] < part[2]]


SESSIONS: Final = Path(__file__).parents[1] / "sessions"
"""Recorded sessions that ship with the bench."""

USERS: Final = 40

LOAD: Final = 0.3
"""Share of the time in which stock would be busy by the fleet's clock. Chosen so that requests are
sent when they are due and pauses keep their meaning: users' turns come in bursts, and at 0.6 one
request in twenty was sent 13 s late, which is two recorded minutes; at 0.3 it is 1 s, five recorded
ones."""

HORIZON_S: Final = 6 * 3600.0  # recorded seconds of a fleet, of which the first requests are played


def recorded_requests(
    sessions: Path, users: int, seed: int, count: int, vocabulary: int
) -> tuple[AgentRequest, ...]:
    fleet = lay_over_users(read_sessions(sessions), users, HORIZON_S, seed)
    return build_requests(fleet[:count], vocabulary, seed)


def pace_of(wall_s: float, requests: Sequence[AgentRequest]) -> float:
    """Seconds that a recorded second should take, if all took ``wall_s`` one after the other."""
    return wall_s / (LOAD * (requests[-1].at - requests[0].at))


def engine_trace(
    requests: Sequence[AgentRequest],
    sent_s: Sequence[float],
    pace: float,
    path: Path,
    took_s: Sequence[float] | None = None,
) -> Trace:
    """Write what was sent as a recording in ``path``, and read it as the lab does."""
    took_s = took_s or [0.0] * len(requests)
    write_trace(_lines(requests, sent_s, took_s, pace), path)
    return load_trace(path)


def _lines(
    requests: Sequence[AgentRequest], sent_s: Sequence[float], took_s: Sequence[float], pace: float
) -> Iterator[dict[str, Any]]:
    yield {"kvgraph_trace": HEADER_VERSION, "block_size": BLOCK}
    blocks = _Blocks()
    for request, at, took in zip(requests, sent_s, took_s, strict=True):
        # The engine never computes the last token that it says.
        kept = blocks.chain(request.prompt + request.answer[:-1])
        prompt = len(request.prompt) // BLOCK
        line: dict[str, Any] = {
            "at": round(at, 6),
            "seconds": round(took, 6),
            "input_length": len(request.prompt),
            "output_length": len(request.answer),
            "session": request.session,
            "hash_ids": kept[:prompt],
            "output_hash_ids": kept[prompt:],
        }
        if request.ended:
            line["ended"] = True
        elif request.waiting is not None:
            line["waiting_for_tool"] = request.waiting
        if request.waiting and request.returns_s is not None:
            line["expected_return_s"] = round(pace * request.returns_s, 3)
        yield line


class _Blocks:
    """Numbers the engine's full blocks by their tokens and all that stands before them."""

    def __init__(self) -> None:
        self._numbers: dict[tuple[int, tuple[int, ...]], int] = {}

    def chain(self, tokens: tuple[int, ...]) -> list[int]:
        before, chain = -1, []
        for start in range(0, len(tokens) - BLOCK + 1, BLOCK):
            key = (before, tokens[start : start + BLOCK])
            before = self._numbers.setdefault(key, len(self._numbers))
            chain.append(before)
        return chain
