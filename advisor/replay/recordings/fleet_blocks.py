"""Which blocks the requests of a fleet walk."""

from __future__ import annotations

from array import array
from collections.abc import Hashable
from typing import Final

from ..errors import ReplayError
from .fleet import FleetRequest
from .weka import Session, Turn

_NOT_SHARED: Final = -1
_FIRST: Final = -1  # block before the first one


class BlockNumbers:
    """Numbers blocks of ``block_size`` tokens across the sessions of a fleet.

    A block is known by the number of the recorded block at its end, which stands for the whole
    prefix. Sessions with tools of equal length share these, and behind them the system prompt where
    its length is equal, too: whole blocks. Sessions of one harness share all of their heads that
    they have in common, with nobody else. A subagent shares with its parent what their recorded
    numbers share. Where numbers are all sessions', equal numbers behind equal ones are one block,
    until the fleet plays its sessions again: then it shares the heads alone.

    Raises:
        ReplayError: ``block_size`` is no multiple of a session's own.
    """

    def __init__(self, block_size: int) -> None:
        self._size = block_size
        self._numbers: dict[Hashable, int] = {}
        self._heads: dict[str, dict[int, int]] = {}  # session → number → place

    def prompt(self, request: FleetRequest) -> list[int]:
        """A number for each full block of the prompt."""
        return self._chain(request, request.turn.hash_ids)

    def answer(self, request: FleetRequest) -> list[int]:
        """A number for each full block that the answer completes.

        If the session's next prompt extends this prompt and its answer, these are that prompt's
        blocks. An answer that it does not contain as it was (thinking is removed, a history is cut)
        fills blocks all the same, which no request asks for again. The last token of an answer is
        never computed: a block that it completes is not kept.
        """
        turn, after = request.turn, request.next_turn
        total = turn.input_tokens + turn.output_tokens
        first, end = turn.input_tokens // self._size, max(0, total - 1) // self._size
        if after is not None and after.input_tokens >= total and _extends(after, turn):
            return self._chain(request, after.hash_ids)[first:end]
        return [self._number((request.run, request.index, place)) for place in range(first, end)]

    def _chain(self, request: FleetRequest, hash_ids: array[int]) -> list[int]:
        step = self._step(request.session)
        if request.session.is_global and not request.session.harness:
            return self._global_chain(request, hash_ids, step)
        head = self._head(request.session, step)
        chain = []
        for hash_id in hash_ids[step - 1 :: step]:
            place = head.get(hash_id, _NOT_SHARED)
            name: Hashable = (request.scope, hash_id)
            if place != _NOT_SHARED:
                name = self._head_name(request.session, place)
            chain.append(self._number(name))
        return chain

    def _head_name(self, session: Session, place: int) -> Hashable:
        if session.harness:
            return session.harness, place
        if (place + 1) * self._size <= session.tool_tokens:
            return session.tool_tokens, place
        return session.tool_tokens, session.system_tokens, place

    def _global_chain(self, request: FleetRequest, hash_ids: array[int], step: int) -> list[int]:
        session, chain, before = request.session, list[int](), _FIRST
        head = (session.tool_tokens + session.system_tokens) // self._size
        for place, end in enumerate(range(step, len(hash_ids) + 1, step)):
            lap = 1 if place < head else request.lap
            before = self._number((lap, before, hash_ids[end - step : end].tobytes()))
            chain.append(before)
        return chain

    def _number(self, name: Hashable) -> int:
        return self._numbers.setdefault(name, len(self._numbers))

    def _head(self, session: Session, step: int) -> dict[int, int]:
        """Recorded number → place in the head, for the whole blocks of a session's head."""
        if session.name not in self._heads:
            blocks = (session.tool_tokens + session.system_tokens) // self._size
            ends = session.turns[0].hash_ids[step - 1 :: step][:blocks]
            self._heads[session.name] = {hash_id: place for place, hash_id in enumerate(ends)}
        return self._heads[session.name]

    def _step(self, session: Session) -> int:
        step, rest = divmod(self._size, session.block_size)
        if rest or not step:
            raise ReplayError(
                f"--block {self._size}: allowed: a multiple of {session.block_size}, "
                f"the block size of {session.name}"
            )
        return step


def _extends(after: Turn, turn: Turn) -> bool:
    return after.hash_ids[: len(turn.hash_ids)] == turn.hash_ids
