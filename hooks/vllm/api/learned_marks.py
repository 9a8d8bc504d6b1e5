"""Learns from a chat template by which marks answers end.

The template writes two conversations, one with an answer in prose and one with a tool call. Where
they part, the call begins; what stands before its tool's name opens calls; what stands behind its
arguments closes them, up to the token that ends the prose's turn too.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING, Final, NamedTuple

import msgspec

from ..ends.end_marks import BRACKETS, EndMarks
from .probes import ANSWER, CALL_IDS, KEY, RESULT, TOOL, VALUE, Probes, text_place

if TYPE_CHECKING:
    from vllm.config import VllmConfig

_ARGUMENTS_BEGIN: Final = re.compile(r"[\[({]?\s*[\"']?\s*$")
_ARGUMENTS_END: Final = "\"'," + BRACKETS
"""What may stand at the end of arguments, and before the mark that closes their call."""


def learn_marks(config: VllmConfig, chat_template: str | None = None) -> EndMarks | None:
    """The marks of an engine's model; None if its template writes no tool calls, or has no form.

    A model whose template has no form for tool calls may call them in prose: then the end of its
    answers says nothing.
    """
    probes = Probes(config, chat_template)
    try:
        return marks_of(probes, str(config.model_config.model))
    finally:
        probes.close()


def marks_of(probes: Probes, model: str = "") -> EndMarks | None:
    """What the renderings of ``probes`` teach."""
    prose = probes.answered()
    ends = _turn_ends(probes, prose)
    for call_id in CALL_IDS:
        with contextlib.suppress(Exception):  # a template that refuses this call may take the next
            if (call := _Call.found(probes, prose, call_id)) is not None:
                return _marks(probes, call, ends, call_id, model)
    return None


class _Call(NamedTuple):
    """Where a call stands in its rendering.

    Attributes:
        tokens: All of the conversation.
        first: The token with which it parts from prose.
        named: The token in which the tool's name begins.
        closed: The first token behind the call's arguments.
        result: The token in which the tool's result begins.
    """

    tokens: list[int]
    first: int
    named: int
    closed: int
    result: int

    @staticmethod
    def found(probes: Probes, prose: Sequence[int], call_id: str) -> _Call | None:
        """Where the call differs from ``prose``; None if it does not show the tool's name."""
        tokens = probes.called(call_id)
        first = _parting(tokens, prose)
        closed = text_place(probes, tokens, VALUE, first, end=True)
        result = text_place(probes, tokens, RESULT, first)
        if closed is None or result is None or closed > result:
            return None
        named = text_place(probes, tokens[:closed], TOOL, first, last=True)  # schemas name it too
        return None if named is None else _Call(tokens, first, named, closed, result)


def _marks(
    probes: Probes, call: _Call, ends: tuple[int, ...], call_id: str, model: str
) -> EndMarks:
    opener, before, behind = _opening(probes, call)
    divider = None if opener is not None else _divider(probes, call)
    closing, further = _closing(probes, call, ends, call_id)
    marks = EndMarks(
        turn_ends=ends,
        call_ends=tuple(token for token in further if token not in ends),
        opener=opener,
        divider=divider,
        before=before,
        after=behind[:1],
        closers=_closers(probes, closing),
        model=model,
    )
    whole = _ARGUMENTS_BEGIN.sub("", behind).strip()
    return msgspec.structs.replace(marks, after=whole) if marks.by_shape and whole else marks


def _turn_ends(probes: Probes, prose: Sequence[int]) -> tuple[int, ...]:
    """The tokenizer's end, and the special token that the template puts behind an answer."""
    ends = [] if probes.end is None else [probes.end]
    said = text_place(probes, prose, ANSWER, 0, end=True)
    behind = [] if said is None else [token for token in prose[said:] if token in probes.special]
    return tuple(dict.fromkeys([*ends, *behind[:1]]))


def _opening(probes: Probes, call: _Call) -> tuple[int | None, str, str]:
    """The last special token before the tool's name, what is between, what is between the name and
    the arguments."""
    opening = range(call.first, call.named)
    places = [place for place in opening if call.tokens[place] in probes.special]
    first = places[-1] + 1 if places else call.first
    before, _, rest = probes.text(call.tokens[first : call.closed]).rpartition(TOOL)
    behind, _, _ = rest.partition(KEY)
    return (call.tokens[first - 1] if places else None), before, behind


def _divider(probes: Probes, call: _Call) -> int | None:
    """The last special token between the tool's name and the arguments."""
    value = text_place(probes, call.tokens, KEY, call.named) or call.closed
    tokens = call.tokens[call.named : value]
    return next((token for token in reversed(tokens) if token in probes.special), None)


def _closing(
    probes: Probes, call: _Call, ends: tuple[int, ...], call_id: str
) -> tuple[list[int], list[int]]:
    """The tokens that close the call's arguments, and the one that ends an answer behind them."""
    behind = call.tokens[call.closed : call.result]
    for place, token in enumerate(behind):
        if token in ends:
            return behind[:place], []
    alone = _without_result(probes, call, call_id)
    further = [token for token in behind[len(alone) :] if token in probes.special]
    return alone, further[:1]


def _without_result(probes: Probes, call: _Call, call_id: str) -> list[int]:
    """What stands behind a call's arguments if nothing follows, where no turn's end does."""
    with contextlib.suppress(Exception):  # some templates end no conversation with a call
        tokens = probes.called(call_id, with_result=False)
        if tokens[: call.closed] == call.tokens[: call.closed]:
            return tokens[call.closed :]
    behind = call.tokens[call.closed : call.result]
    places = [place for place, token in enumerate(behind) if token in probes.special]
    return behind[: places[0] + 1] if places else []


def _closers(probes: Probes, closing: Sequence[int]) -> tuple[str, ...]:
    """The texts with which a call ends: the special tokens at the end, or the last word, or a
    bracket."""
    special = []
    for token in reversed(closing):
        if token in probes.special:
            special.append(probes.text([token]))
        elif probes.text([token]).strip():
            break
    if special:
        return tuple(dict.fromkeys(special))
    words = probes.text(closing).split()
    if not words:
        return ()
    last = words[-1][-1]
    return (last if last in BRACKETS else words[-1].lstrip(_ARGUMENTS_END),)


def _parting(one: Sequence[int], other: Sequence[int]) -> int:
    """The first place at which two conversations differ."""
    for place, (token, theirs) in enumerate(zip(one, other, strict=False)):
        if token != theirs:
            return place
    return min(len(one), len(other))
