"""Requests of recorded agents, as they are sent to a real engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final

from kvgraph.advisor.replay.fleet_traffic import (
    BlockNumbers,
    FleetRequest,
    layers,
    rough_return_s,
    waiting_for_tool,
)

from .agents_forcing import ANSWER
from .agents_text import ROOT, Kind, TokenWriter, endings

SHRINK: Final = 64
"""Recorded tokens that one token of the engine stands for: the size of a recorded block."""

Layers = tuple[tuple[str, int, int], ...]


@dataclass(frozen=True, slots=True)
class AgentRequest:
    """One request.

    Attributes:
        name: Names the request across arms.
        at: Recorded seconds since the fleet began.
        session: The name of this playing of a recorded session.
        prompt: Token ids.
        answer: The token ids that the server is made to say; the last one ends it.
        ended: Whether the session never comes back.
        waiting: Whether the answer called a tool; None: nobody knows.
        returns_s: Roughly how many recorded seconds the tool takes; None: nobody knows.
        layers: ``(source layer, first token, end token)`` of the prompt's head.
    """

    name: str
    at: float
    session: str
    prompt: tuple[int, ...]
    answer: tuple[int, ...]
    ended: bool
    waiting: bool | None
    returns_s: float | None
    layers: Layers

    def body(self, pace: float, hinted: bool, layered: bool = False) -> dict[str, Any]:
        """The JSON of the request.

        Args:
            pace: Seconds that a recorded second takes.
            hinted: Whether the caller tells what it knows of its session.
            layered: Whether it tells where the prompt's parts lie.
        """
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
    """The requests of a fleet; the same arguments give the same ones.

    Raises:
        TrafficError: The vocabulary is too small for this fleet.
    """
    scribe = _Scribe(vocabulary, seed)
    return tuple(scribe.request(each, seed) for each in fleet)


class _Scribe:
    """Writes prompts and answers in order of arrival."""

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
        """Numbers of the answer's blocks: the next prompt's, if it holds prompt and answer."""
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
