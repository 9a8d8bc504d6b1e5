"""Sessions that were forked from others: a subagent begins with what its parent has said."""

from __future__ import annotations

from collections import OrderedDict
from typing import Final

from ..types import NEVER, NO_ROW, SessionState, StopReason
from .sessions import SessionTable

_KEPT: Final = 65_536  # forks that are remembered, the last ones; chosen


class ForkBook:
    """Knows who waits for whom.

    While a fork is at work, its parent waits for it: the parent is expected as soon as the fork has
    ended its turn, and not before. What a caller states of the parent stands: once anything else
    than our last word is expected of a parent, we say no more of it until it is forked again.
    """

    def __init__(self, sessions: SessionTable) -> None:
        self._sessions = sessions
        self._parents: OrderedDict[int, tuple[str, int, str]] = OrderedDict()
        self._said: dict[int, float] = {}  # parent → the return that we wrote last

    def forked(self, child: int, parent: int) -> None:
        """Note that ``child`` began with what is ``parent``'s alone."""
        names = self._sessions.names
        if not self._stands(parent):
            self._said.pop(parent, None)
        self._parents[child] = names[child], parent, names[parent]
        if len(self._parents) > _KEPT:
            self._parents.popitem(last=False)

    def parent_of(self, child: int) -> int:
        """Who waits for a session; ``NO_ROW`` for nobody. Rows are reused: names tell."""
        name, parent, parents_name = self._parents.get(child, ("", NO_ROW, ""))
        names = self._sessions.names
        same = parent != NO_ROW and names[child] == name and names[parent] == parents_name
        return parent if same else NO_ROW

    def works(self, child: int, now: float) -> None:
        """Note that a request of ``child`` began or ended."""
        parent = self.parent_of(child)
        if parent == NO_ROW or not self._may_say(parent):
            return
        sessions = self._sessions
        over = (
            sessions.state[child] == SessionState.ENDED
            or sessions.stop[child] == StopReason.END_OF_TURN
        )
        at_rest = sessions.running[child] == 0
        rest = float(sessions.gap[child]) if sessions.gap[child] > 0 else _UNKNOWN_S
        sessions.expected_return[parent] = now if at_rest and over else now + rest
        self._said[parent] = float(sessions.expected_return[parent])

    def _stands(self, parent: int) -> bool:
        """Whether the parent's expected return is still our word."""
        return self._said.get(parent) == float(self._sessions.expected_return[parent])

    def _may_say(self, parent: int) -> bool:
        """Whether the parent waits, and nobody else has said until when."""
        sessions = self._sessions
        if sessions.state[parent] != SessionState.WAITING_FOR_TOOL:
            return False
        if parent in self._said:
            return self._stands(parent)
        return bool(sessions.expected_return[parent] == NEVER)


_UNKNOWN_S: Final = 10.0
"""Until the next turn of a fork that has had one only; chosen."""
