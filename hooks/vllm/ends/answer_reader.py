"""Reads why an answer ended off its last tokens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Final, NamedTuple, Protocol

from .call_shape import CallShape, is_one_expression
from .end_marks import EndMarks

# All chosen; in tokens, unless it says otherwise.
_TAIL: Final = 12  # of an answer, in which a call's last mark stands
_NAMED_WITHIN: Final = 48  # from what opens a call to behind its tool's name
_OPENERS: Final = 32  # of an answer, that are looked behind
_HEAD, _END = 768, 256  # of an answer, searched for a name where no token stands beside it
_LONGEST: Final = 1024  # of a call whose brackets are looked at
_FEW: Final = 4  # ends, one behind the other


class Ending(NamedTuple):
    """Why an answer ended; the fields are those of ``RequestFinished``."""

    waiting_for_tool: bool | None = None
    tool: str | None = None


_REQUIRED: Final = CallShape('[{"name": "', '", "parameters":')
"""How vLLM has a call written where ``tool_choice`` requires one."""

UNKNOWN: Final = Ending()
END_OF_TURN: Final = Ending(waiting_for_tool=False)


class Tokens(Protocol):
    """An answer, as vLLM keeps it."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Sequence[int]: ...

    def index(self, token: int, start: int = ..., stop: int = ...) -> int: ...


class AnswerReader:
    """Tells a tool call from the end of a turn, by where the answer ends.

    Only the answer's own tokens are read: marks in a prompt mean nothing, and so does a call that
    is quoted in an answer that goes on behind it.

    Args:
        marks: Of the model that answers.
        decode: Tokens as text, special ones too.
    """

    def __init__(self, marks: EndMarks, decode: Callable[[Sequence[int]], str]) -> None:
        self._marks = marks
        self._decode = decode
        self._ends = frozenset((*marks.turn_ends, *marks.call_ends))
        self._call_ends = frozenset(marks.call_ends)
        self._shape = CallShape(marks.before, marks.after) if marks.names_tools else None

    def read(self, answer: Tokens) -> Ending:
        """Why ``answer`` ended, of which the engine says that the model, or a stop token, ended
        it."""
        ends = self._ended_by(answer)
        body = len(answer) - len(ends)
        if self._call_ends.intersection(ends):
            return Ending(True, self._name(answer, body))
        if self._marks.closers and self._closes(answer, body):
            name = self._name(answer, body)
            if name is not None or self._is_opened(answer, body):
                return Ending(True, name)
        return END_OF_TURN if ends else UNKNOWN

    def read_bound(self, answer: Tokens) -> Ending:
        """The same for an answer that had to follow a grammar.

        Where a tool has to be called, vLLM's grammar is a list of calls without any marks. Who
        reads other answers in a form, a person or a program, nobody can tell.
        """
        ending = self.read(answer)
        if ending.waiting_for_tool:
            return ending
        body = len(answer) - len(self._ended_by(answer))
        if body <= _LONGEST and is_one_expression(self._decode(answer[:body])):
            name = _REQUIRED.at_start(self._decode(answer[: min(body, _NAMED_WITHIN)]))
            return Ending(True, name) if name is not None else UNKNOWN
        return UNKNOWN

    def _ended_by(self, answer: Tokens) -> list[int]:
        """The tokens at the end of ``answer`` that end answers, the last one first."""
        ends = []
        for token in reversed(answer[max(0, len(answer) - _FEW) :]):
            if token not in self._ends:
                break
            ends.append(token)
        return ends

    def _closes(self, answer: Tokens, body: int) -> bool:
        """Whether the last of an answer's first ``body`` tokens close a call."""
        tail = self._decode(answer[max(0, body - _TAIL) : body]).rstrip()
        return tail.endswith(self._marks.closers)

    def _is_opened(self, answer: Tokens, body: int) -> bool:
        """Whether an answer that closes a call need not show its tool's name to be one."""
        opener = self._marks.opener
        if self._marks.by_shape:
            return False
        return opener is None or next(_places(answer, opener, body), None) is not None

    def _name(self, answer: Tokens, body: int) -> str | None:
        """The tool that an answer's first ``body`` tokens name: by the first opener that a name
        follows, or else by the last name."""
        if self._shape is None:
            return None
        if self._marks.opener is not None:
            places = _places(answer, self._marks.opener, body)
            return self._first_name(self._shape, (place + 1 for place in places), answer, body)
        if self._marks.by_shape:  # nothing but its beginning shows where such a call begins
            return self._first_name(self._shape, [0], answer, body)
        if self._marks.divider is not None:
            return self._name_before(self._shape, self._marks.divider, answer, body)
        head = self._shape.search(self._decode(answer[: min(body, _HEAD)]))
        if head is not None or body <= _HEAD:
            return head
        return self._shape.search(self._decode(answer[max(_HEAD, body - _END) : body]), last=True)

    def _first_name(
        self, shape: CallShape, places: Iterable[int], answer: Tokens, body: int
    ) -> str | None:
        """The first name that begins a call at one of ``places``."""
        for place in places:
            text = self._decode(answer[place : min(body, place + _NAMED_WITHIN)])
            name = shape.at_start(text)
            if name is not None and self._runs_through(answer, place, body):
                return name
        return None

    def _name_before(self, shape: CallShape, divider: int, answer: Tokens, body: int) -> str | None:
        """The first name that stands before a ``divider``."""
        for place in _places(answer, divider, body):
            text = self._decode(answer[max(0, place - _NAMED_WITHIN) : place + 1])
            if (name := shape.search(text, last=True)) is not None:
                return name
        return None

    def _runs_through(self, answer: Tokens, first: int, body: int) -> bool:
        """Whether a call that begins at ``first`` is all of the rest, where only its shape tells.

        One that is too long to be looked at is taken for it.
        """
        if not self._marks.by_shape or body - first > _LONGEST:
            return True
        return is_one_expression(self._decode(answer[first:body]))


def _places(answer: Tokens, token: int, body: int) -> Iterator[int]:
    """The first places of ``token`` among an answer's first ``body`` tokens."""
    place = -1
    with contextlib.suppress(ValueError):
        for _ in range(_OPENERS):
            place = answer.index(token, place + 1, body)
            yield place
