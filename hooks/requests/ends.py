"""Tells from an answer's last tokens whether a tool call or the end of a turn ended it."""

from __future__ import annotations

import contextlib
import logging
import re
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Annotated, Any, Final, NamedTuple, Protocol

import msgspec

from ..settings import ENDS_KEY, ENDS_VARIABLE, OFF, ON

logger = logging.getLogger(__name__)

BRACKETS: Final = "]})"  # end of a call where the template puts nothing after its arguments

_Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Tokens = Annotated[tuple[_Token, ...], msgspec.Meta(max_length=64)]
_Text = Annotated[str, msgspec.Meta(max_length=256)]


class EndMarks(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """How one model's answers end."""

    turn_ends: _Tokens  # tokens that end an answer's turn
    call_ends: _Tokens = ()  # tokens that end an answer whose last part is a tool call
    opener: _Token | None = None  # last special token before a tool's name; None if there is none
    # Last special token between a tool's name and its arguments, if there is no opener.
    divider: _Token | None = None
    # Text between that token and the name, or before the name; white space may differ.
    before: _Text = ""
    # Text after the name: one character, or all up to the arguments if only a call's shape
    # identifies it.
    after: _Text = ""
    # Texts that end a call, before any of the tokens above.
    closers: Annotated[tuple[_Text, ...], msgspec.Meta(max_length=16)] = ()
    model: str = ""  # the model that these marks belong to; empty for whichever engine reads them

    @property
    def by_shape(self) -> bool:
        """Whether a call can be told from other text ending in a bracket only by how it begins."""
        return bool(self.closers) and set(self.closers) <= set(BRACKETS)

    @property
    def names_tools(self) -> bool:
        return bool(self.after) and (self.opener is not None or bool(self.before.strip()))

    def are_of(self, model: str) -> bool:
        """Return whether the marks apply to an engine of this model."""
        return self.model in ("", model)

    def text(self) -> str:
        return msgspec.json.encode(self).decode()


def read_marks(text: str) -> EndMarks:
    """Parse the JSON of ``EndMarks.text``, or an operator's own; raises ValueError."""
    return msgspec.json.decode(text, type=EndMarks)


def configured_marks(
    extra_config: Mapping[str, Any], environment: Mapping[str, str]
) -> EndMarks | None:
    """Return the connector's or environment's marks; None without; bad ones are warned of."""
    text = extra_config.get(ENDS_KEY) or environment.get(ENDS_VARIABLE)
    if not text or str(text).strip().lower() in (*ON, *OFF):
        return None
    try:
        return read_marks(str(text))
    except ValueError as error:
        logger.warning(
            "kvgraph: %s=%.80r is not understood: %s; it is ignored; allowed: 1, 0, or the tokens "
            'as JSON: {"turn_ends": [2], "call_ends": [7]}',
            ENDS_VARIABLE,
            text,
            error,
        )
        return None


_NAME: Final = r"(?P<name>\w[\w.\-/]{0,63})"
"""What counts as a tool's name; anything else is not reported."""
_PIECES: Final = re.compile(r"\w+|[^\w\s]")
_STRINGS: Final = re.compile(r'"(?:\\.|[^"\\])*"|\'(?:\\.|[^\'\\])*\'', re.DOTALL)
_BARE: Final = re.compile(r"[^\s,;]")


class CallShape:
    """Finds a tool's name between the texts that the template writes around it."""

    def __init__(self, before: str, after: str) -> None:
        ends = r"\s" if after.isspace() else r"\s*" + _loosely(after)
        self._pattern = re.compile(rf"{_loosely(before)}\s*{_NAME}{ends}")

    def at_start(self, text: str) -> str | None:
        found = self._pattern.match(text.lstrip())
        return found["name"] if found else None

    def search(self, text: str, last: bool = False) -> str | None:
        names = (found["name"] for found in self._pattern.finditer(text))
        found = deque(names, maxlen=1) if last else [*islice(names, 1)]
        return found[0] if found else None


def is_one_expression(text: str) -> bool:
    """Return whether ``text`` ends with its first balanced bracket."""
    depth, opened = 0, False
    for found in _BARE.finditer(_STRINGS.sub("", text)):
        mark = found.group()
        if mark in "[({":
            depth, opened = depth + 1, True
        elif mark in "])}":
            depth -= 1
        elif opened and not depth:
            return False
    return opened and not depth


def _loosely(text: str) -> str:
    """Return a pattern that matches ``text`` with any white space."""
    return r"\s*".join(map(re.escape, _PIECES.findall(text)))


# All chosen; in tokens unless stated.
_TAIL: Final = 12  # end of an answer that is searched for a call's closer
_NAMED_WITHIN: Final = 48  # from a call's opener to the end of its tool's name
_OPENERS: Final = 32  # openers of an answer that are tried
# Start and end of an answer that are searched for a name if no token stands beside it.
_HEAD, _END = 768, 256
_LONGEST: Final = 1024  # longest call whose brackets are checked
_FEW: Final = 4  # end tokens in a row


class Ending(NamedTuple):
    """Why an answer ended; the fields are those of ``RequestFinished``."""

    waiting_for_tool: bool | None = None
    tool: str | None = None


_REQUIRED: Final = CallShape('[{"name": "', '", "parameters":')
"""Form of a call that vLLM enforces where ``tool_choice`` requires one."""

UNKNOWN: Final = Ending()
END_OF_TURN: Final = Ending(waiting_for_tool=False)


class Tokens(Protocol):
    """An answer's tokens, as vLLM keeps them."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice, /) -> Sequence[int]: ...

    def index(self, token: int, start: int = ..., stop: int = ...) -> int: ...


class AnswerReader:
    """Tells a tool call from the end of a turn by how an answer ends.

    Only the answer's own tokens are read: marks in a prompt mean nothing, nor does a call that is
    quoted in the middle of an answer.
    """

    def __init__(self, marks: EndMarks, decode: Callable[[Sequence[int]], str]) -> None:
        self._marks = marks
        self._decode = decode
        self._ends = frozenset((*marks.turn_ends, *marks.call_ends))
        self._call_ends = frozenset(marks.call_ends)
        self._shape = CallShape(marks.before, marks.after) if marks.names_tools else None

    def read(self, answer: Tokens) -> Ending:
        """Return why ``answer`` ended, which the model or a stop token ended."""
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
        """Return why an answer ended if a grammar constrained its text, as for a required tool
        call.

        Such a call carries none of the model's marks. For an answer in any
        other form the reason is unknown: a person or a program may have asked for the grammar.
        """
        # vLLM's grammar for a required call is a list of calls.
        ending = self.read(answer)
        if ending.waiting_for_tool:
            return ending
        body = len(answer) - len(self._ended_by(answer))
        if body <= _LONGEST and is_one_expression(self._decode(answer[:body])):
            name = _REQUIRED.at_start(self._decode(answer[: min(body, _NAMED_WITHIN)]))
            return Ending(True, name) if name is not None else UNKNOWN
        return UNKNOWN

    def _ended_by(self, answer: Tokens) -> list[int]:
        ends = []
        for token in reversed(answer[max(0, len(answer) - _FEW) :]):
            if token not in self._ends:
                break
            ends.append(token)
        return ends

    def _closes(self, answer: Tokens, body: int) -> bool:
        tail = self._decode(answer[max(0, body - _TAIL) : body]).rstrip()
        return tail.endswith(self._marks.closers)

    def _is_opened(self, answer: Tokens, body: int) -> bool:
        opener = self._marks.opener
        if self._marks.by_shape:
            return False
        return opener is None or next(_places(answer, opener, body), None) is not None

    def _name(self, answer: Tokens, body: int) -> str | None:
        """Return the tool that a call names: behind the first opener with a name, or the last."""
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
        for place in places:
            text = self._decode(answer[place : min(body, place + _NAMED_WITHIN)])
            name = shape.at_start(text)
            if name is not None and self._runs_through(answer, place, body):
                return name
        return None

    def _name_before(self, shape: CallShape, divider: int, answer: Tokens, body: int) -> str | None:
        for place in _places(answer, divider, body):
            text = self._decode(answer[max(0, place - _NAMED_WITHIN) : place + 1])
            if (name := shape.search(text, last=True)) is not None:
                return name
        return None

    def _runs_through(self, answer: Tokens, first: int, body: int) -> bool:
        if not self._marks.by_shape or body - first > _LONGEST:
            return True
        return is_one_expression(self._decode(answer[first:body]))


def _places(answer: Tokens, token: int, body: int) -> Iterator[int]:
    place = -1
    with contextlib.suppress(ValueError):
        for _ in range(_OPENERS):
            place = answer.index(token, place + 1, body)
            yield place
