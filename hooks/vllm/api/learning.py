"""Renders made conversations with vLLM's own renderer, to learn what its chat template writes."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import re
import secrets
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import msgspec

from ....graph.types import SourceLayer
from ...requests.borders import (
    LONGEST_BORDER,
    Border,
    BorderTable,
    TokenPlaces,
    decoder,
    stated_sections,
)
from ...requests.ends import BRACKETS, EndMarks, handed_over
from ...settings import reads_ends, reads_layers

if TYPE_CHECKING:
    from vllm.config import VllmConfig

Message = dict[str, Any]

TOOL: Final = "zq_probe_tool"
KEY: Final = "zqkey"
VALUE: Final = "zqvalue"
ANSWER: Final = "Zqanswer"
RESULT: Final = "Zqresult"
DESCRIPTION: Final = "A probe."
CALL_IDS: Final = ("zqcall001", f"functions.{TOOL}:0")
"""Names of a call: some templates want nine letters and digits, some write no other name."""

_TOOLS: Final[list[Message]] = [
    {
        "type": "function",
        "function": {
            "name": TOOL,
            "description": DESCRIPTION,
            "parameters": {"type": "object", "properties": {KEY: {"type": "string"}}},
        },
    }
]
ASKED: Final[Message] = {"role": "user", "content": "Zqquestion"}


class Probes:
    """Renders as the API process will.

    Args:
        config: The engine's.
        chat_template: The one that the server was given in place of the model's; None: the model's.

    Attributes:
        special: Tokens that stand for themselves, whatever is beside them.
        text: Decodes tokens, special ones too.

    Raises:
        Exception: Whatever vLLM raises where a model has no tokenizer or no renderer.
    """

    def __init__(self, config: VllmConfig, chat_template: str | None = None) -> None:
        from vllm.renderers import renderer_from_config

        self._renderer = renderer_from_config(_of_text_alone(config))
        self._template = chat_template
        self._tokenizer = self._renderer.get_tokenizer()
        self.special = special_tokens(self._tokenizer)
        self.text = decoder(self._tokenizer)

    def close(self) -> None:
        """Give the renderer's threads back."""
        self._renderer.shutdown()

    @property
    def end(self) -> int | None:
        """The token that the tokenizer calls the end."""
        end: int | None = self._tokenizer.eos_token_id
        return end

    def answered(self) -> list[int]:
        """Tokens of a conversation that goes on behind an answer in prose."""
        answer = {"role": "assistant", "content": ANSWER}
        return self.render([ASKED, answer, {"role": "user", "content": RESULT}])

    def called(self, call_id: str, with_result: bool = True) -> list[int]:
        """Tokens of a conversation with a tool call, and its result if that is wanted."""
        return self.render([ASKED, *called(call_id)[: None if with_result else 1]])

    def render(self, messages: Sequence[Message], tools: bool = True) -> list[int]:
        """Tokens of a conversation, with a description of the tool if ``tools``."""
        from vllm.renderers import ChatParams

        asked = {
            "tools": copy.deepcopy(_TOOLS) if tools else None, "tokenize": True,
            "add_generation_prompt": False, "continue_final_message": False,
        }  # fmt: skip
        params = ChatParams(chat_template=self._template, chat_template_kwargs=asked)
        with _quiet():
            _, prompt = self._renderer.render_messages(copy.deepcopy(list(messages)), params)
        tokens = prompt.get("prompt_token_ids")
        if tokens is None:
            tokens = self._tokenizer.encode(prompt["prompt"], add_special_tokens=False)
        return list(tokens)


def called(call_id: str) -> list[Message]:
    """A call of the tool, and its result."""
    function = {"name": TOOL, "arguments": f'{{"{KEY}": "{VALUE}"}}'}
    call = {"id": call_id, "type": "function", "function": function}
    return [
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": call_id, "name": TOOL, "content": RESULT},
    ]


def text_place(
    probes: Probes,
    tokens: Sequence[int],
    text: str,
    first: int,
    end: bool = False,
    last: bool = False,
) -> int | None:
    """The place of the token in which ``text`` begins, or with ``end`` the one behind it; None if
    it does not stand in ``tokens[first:]``.

    Args:
        last: Whether its last place is meant, not its first.
    """
    whole = probes.text(tokens[first:])
    at = whole.rfind(text) if last else whole.find(text)
    if at < 0:
        return None
    wanted = at + (len(text) if end else 1)
    low, high = first + 1, len(tokens)
    while low < high:
        middle = (low + high) // 2
        if len(probes.text(tokens[first:middle])) < wanted:
            low = middle + 1
        else:
            high = middle
    return low if end else low - 1


def special_tokens(tokenizer: Any) -> frozenset[int]:
    """Tokens that stand for themselves, whatever is beside them."""
    found = set(tokenizer.all_special_ids)
    with contextlib.suppress(Exception):  # not every tokenizer of vLLM's has it
        found.update(tokenizer.get_added_vocab().values())
    return frozenset(found)


def _of_text_alone(config: VllmConfig) -> VllmConfig:
    """The same for a model without images and the like: their processors are not needed here."""
    text = copy.copy(config)
    text.model_config = copy.copy(config.model_config)
    text.model_config.multimodal_config = None
    return text


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """A template that refuses a probe is no news for whoever reads vLLM's log."""
    logger = logging.getLogger("vllm.renderers.hf")
    logger.addFilter(_nothing)
    try:
        yield
    finally:
        logger.removeFilter(_nothing)


def _nothing(_: logging.LogRecord) -> bool:
    return False


# Conversations whose renderings show where each message begins.

SYSTEM: Final = "Zqsystem"
QUESTION: Final = "Zqquestion"
SECOND: Final = "Zqfurther"


class Part(NamedTuple):
    """What stands before a message's text.

    Attributes:
        layer: Of the text.
        before: Tokens from the end of the text before it on; of the first, from the start on.
    """

    layer: SourceLayer
    before: list[int]


class Conversation(NamedTuple):
    """A rendered conversation.

    Attributes:
        parts: What it shows, in its order.
    """

    parts: list[Part]


_Wanted = tuple[SourceLayer, str]
_SYSTEM: Final[_Wanted] = (SourceLayer.RULES, SYSTEM)
_SCHEMA: Final = 40  # tokens from a tool's description to the end of its schema, at most
_PROSE: Final[tuple[_Wanted, ...]] = (
    (SourceLayer.USER_TURN, QUESTION),
    (SourceLayer.GENERATION, ANSWER),
    (SourceLayer.USER_TURN, SECOND),
)
_CALLING: Final[tuple[_Wanted, ...]] = (
    (SourceLayer.USER_TURN, QUESTION),
    (SourceLayer.GENERATION, VALUE),
    (SourceLayer.TOOL_RESULT, RESULT),
    (SourceLayer.GENERATION, ANSWER),
    (SourceLayer.USER_TURN, SECOND),
)


def conversations(probes: Probes) -> Iterator[Conversation]:
    """All conversations that the template renders, with and without system text and tools."""
    for has_system in (True, False):
        for has_tools in (False, True):
            for messages, wanted in _made(has_system):
                with contextlib.suppress(Exception):  # a template may refuse any of them
                    tokens = probes.render(messages, tools=has_tools)
                    yield Conversation(_parts(probes, tokens, wanted, has_tools))


def _made(has_system: bool) -> Iterator[tuple[list[Message], tuple[_Wanted, ...]]]:
    first: list[Message] = [{"role": "system", "content": SYSTEM}] if has_system else []
    lead = (_SYSTEM,) if has_system else ()
    asked, further = ASKED, {"role": "user", "content": SECOND}
    answer: Message = {"role": "assistant", "content": ANSWER}
    yield [*first, asked, answer, further], (*lead, *_PROSE)
    for call_id in CALL_IDS:
        yield [*first, asked, *called(call_id), answer, further], (*lead, *_CALLING)


def _parts(
    probes: Probes, tokens: list[int], wanted: Sequence[_Wanted], has_tools: bool
) -> list[Part]:
    """What stands before each text that is found; the others are left out."""
    places = [] if not has_tools else list(_schema(probes, tokens))
    for layer, text in wanted:
        start = text_place(probes, tokens, text, 0)
        if start is not None:
            stop = text_place(probes, tokens, text, 0, end=True) or start
            places.append((start, stop, layer))
    parts, end = [], 0
    for start, stop, layer in sorted(places):
        parts.append(Part(layer, tokens[end:start]))
        end = max(end, stop)
    return parts


def _schema(probes: Probes, tokens: list[int]) -> Iterator[tuple[int, int, SourceLayer]]:
    """Where the tool is described: from its name on, up to what its parameters are called."""
    told = text_place(probes, tokens, DESCRIPTION, 0) or text_place(probes, tokens, QUESTION, 0)
    named = text_place(probes, tokens[:told], TOOL, 0, last=True)
    if named is None:
        return
    end = text_place(probes, tokens[: (told or 0) + _SCHEMA], KEY, named, end=True)
    yield named, end or named + 1, SourceLayer.CAPABILITIES


# Learns from a chat template with which tokens messages of each kind begin.
#
# What the template writes between two messages' texts is a gap. A border is the end of a gap,
# from its last special token on; where messages of different kinds would begin with the same
# border, from the special token before that one on, and so forth.

_PROBED: Final = (TOOL, KEY, *CALL_IDS)
_INNER: Final = 8  # tokens of a border that is mere text: enough not to be met by chance


def learn_borders(
    config: VllmConfig, sections: dict[str, int], chat_template: str | None = None
) -> BorderTable | None:
    """The borders of an engine's model; None if its template shows none."""
    probes = Probes(config, chat_template)
    try:
        return borders_of(probes, sections, str(config.model_config.model))
    finally:
        probes.close()


def borders_of(
    probes: Probes, sections: dict[str, int] | None = None, model: str = ""
) -> BorderTable | None:
    """What the renderings of ``probes`` teach."""
    shown = list(conversations(probes))
    if not shown:
        return None
    gaps = [gap for conversation in shown for gap in _gaps(probes, conversation)]
    _without_ends(gaps)
    borders = _told_apart([gap for gap in gaps if gap.starts])
    if not any(border.layer == SourceLayer.USER_TURN for border in borders):
        return None
    inner = {border for gap in gaps if not gap.starts for border in _inner(probes, gap)}
    known = {border.tokens for border in borders}
    return BorderTable(
        borders=tuple(sorted(borders, key=_order)),
        inner=tuple(sorted((each for each in inner if each.tokens not in known), key=_order)),
        sections=tuple(sorted((sections or {}).items())),
        sealed=_is_sealed(probes, borders),
        system_last=any(map(_has_system_last, shown)),
        proof=secrets.token_hex(16),
        model=model,
    )


@dataclass
class _Gap:
    """What stands before a message's text.

    Attributes:
        tokens: All of it.
        cuts: Places of what is not the same before every such text; the last one is the end.
        starts: Places of its special tokens that a border may begin with, the last one last.
        is_first: Whether it begins the prompt.
    """

    layer: SourceLayer
    tokens: list[int]
    cuts: list[int]
    starts: list[int]
    is_first: bool

    @property
    def border(self) -> tuple[int, ...]:
        """The border as far as it is told apart by now."""
        start = self.starts[-1] if self.starts else 0
        end = next((cut for cut in self.cuts if cut > start), len(self.tokens))
        most = _INNER if self.layer is SourceLayer.CAPABILITIES else LONGEST_BORDER
        return tuple(self.tokens[start : min(end, start + most)])


def _gaps(probes: Probes, conversation: Conversation) -> Iterable[_Gap]:
    """A conversation's gaps; where a system text is part of a user's turn, that turn begins
    before it."""
    merged = False
    for part, behind in zip(conversation.parts, [*conversation.parts[1:], None], strict=True):
        layer, starts = part.layer, _specials(probes, part.before)
        if layer is SourceLayer.RULES and behind is not None:
            merged = _is_merged(probes, behind)
            layer = SourceLayer.USER_TURN if merged else layer
        if starts or not merged:
            cuts = [*_cuts(probes, part), len(part.before)]
            yield _Gap(layer, part.before, cuts, starts, part is conversation.parts[0])


def _is_merged(probes: Probes, behind: Part) -> bool:
    """Whether no special token stands between a system text and the user's."""
    special = any(token in probes.special for token in behind.before)
    return behind.layer is SourceLayer.USER_TURN and not special


def _specials(probes: Probes, tokens: Sequence[int]) -> list[int]:
    return [place for place, token in enumerate(tokens) if token in probes.special]


def _cuts(probes: Probes, part: Part) -> list[int]:
    """Where what follows is not the same before every text: names that only probes have, and white
    space at the end."""
    tokens, cuts = part.before, []
    text, places = probes.text(tokens), TokenPlaces(probes.text, tokens)
    for name in _PROBED:
        for found in re.finditer(re.escape(name), text):
            cut = places.of(found.start())
            # The last letters before a name may be one token with another name's first.
            cuts.append(cut - (cut > 1 and tokens[cut - 1] not in probes.special))
    end = len(tokens)
    while end and tokens[end - 1] not in probes.special and _ends_in_space(probes, tokens[end - 1]):
        end -= 1
    return sorted({*cuts, end} - {0})


def _ends_in_space(probes: Probes, token: int) -> bool:
    """Whether a token may be another one before another text."""
    text = probes.text([token])
    return not text.strip() or text[-1].isspace()


def _told_apart(gaps: list[_Gap]) -> set[Border]:
    """Borders of the gaps, each so long that its special tokens tell it from other layers'."""
    while unclear := _unclear(gaps):
        for gap in unclear:
            if len(gap.starts) > 1:
                gap.starts.pop()
            else:  # nothing tells them apart: the least precious of the layers
                gap.layer = max(each.layer for each in gaps if each.border == gap.border)
    return {Border(int(gap.layer), gap.border) for gap in gaps}


def _unclear(gaps: list[_Gap]) -> list[_Gap]:
    """Gaps whose border is another layer's, too, or begins as another layer's while more special
    tokens stand before it."""
    borders: dict[tuple[int, ...], set[SourceLayer]] = {}
    firsts: dict[int, set[SourceLayer]] = {}
    for gap in gaps:
        borders.setdefault(gap.border, set()).add(gap.layer)
        if gap.layer is not SourceLayer.CAPABILITIES:
            firsts.setdefault(gap.border[0], set()).add(gap.layer)
    same = [gap for gap in gaps if len(borders[gap.border]) > 1]
    return same or [
        gap
        for gap in gaps
        if len(gap.starts) > 1
        and gap.layer is not SourceLayer.CAPABILITIES
        and len(firsts[gap.border[0]]) > 1
    ]


def _has_system_last(conversation: Conversation) -> bool:
    """Whether the system text stands behind the first of several user's texts."""
    layers = [part.layer for part in conversation.parts]
    return (
        SourceLayer.RULES in layers
        and SourceLayer.USER_TURN in layers[: layers.index(SourceLayer.RULES)]
    )


def _without_ends(gaps: list[_Gap]) -> None:
    """Take from the gaps' special tokens those that end texts, and those that begin every prompt,
    where others are left."""
    behind: dict[int, set[SourceLayer]] = {}
    later = {gap.tokens[place] for gap in gaps if not gap.is_first for place in gap.starts}
    for gap in gaps:
        if gap.starts and not gap.is_first:
            behind.setdefault(gap.tokens[gap.starts[0]], set()).add(gap.layer)
    ends = {token for token, layers in behind.items() if len(layers) > 1}
    for gap in gaps:
        begins = [place for place in gap.starts if gap.tokens[place] in later | ends]
        known = begins if gap.is_first and begins else gap.starts
        last = max((place for place in known[:-1] if gap.tokens[place] in ends), default=-1)
        gap.starts = [place for place in known if place > last] or known[-1:]
        if gap.layer is SourceLayer.CAPABILITIES:  # only the template writes what follows
            gap.starts = gap.starts[:1]


def _inner(probes: Probes, gap: _Gap) -> Iterable[Border]:
    """The border of a gap that has no special token: its text, where it is long enough."""
    tokens = list(gap.border)
    while tokens and not probes.text(tokens[:1]).strip():
        tokens = tokens[1:]
    if gap.layer is SourceLayer.CAPABILITIES and len(tokens) >= 2:
        yield Border(int(gap.layer), tuple(tokens[:_INNER]))
    elif gap.layer in (SourceLayer.RULES, SourceLayer.USER_TURN) and len(tokens) >= 2:
        yield Border(int(gap.layer), tuple(tokens[-_INNER:]))


def _is_sealed(probes: Probes, borders: Iterable[Border]) -> bool:
    """Whether the typed name of a special token stays text where it is rendered."""
    user = next(each for each in borders if each.layer == SourceLayer.USER_TURN)
    name = probes.text(user.tokens[:1])
    plain, typed = (
        probes.render([{"role": "user", "content": f"{QUESTION} {text}"}], tools=False)
        for text in ("", f"{name} {name}")
    )
    return typed.count(user.tokens[0]) == plain.count(user.tokens[0])


def _order(border: Border) -> tuple[int, tuple[int, ...]]:
    return border.layer, border.tokens


# With which borders an engine's messages begin, learned at its start.

logger = logging.getLogger(__name__)


def engine_borders(config: VllmConfig, chat_template: str | None = None) -> str:
    """The table as it is handed to the scheduler's process; empty if there is none.

    Never raises: of an engine whose template cannot be read, no layers are.
    """
    if not reads_layers():
        return ""
    try:
        table = learn_borders(config, stated_sections(os.environ), chat_template)
    except Exception:
        logger.debug("kvgraph: the chat template could not be tried", exc_info=True)
        return ""
    if table is None:
        logger.debug("kvgraph: the chat template shows no borders of messages")
        return ""
    logger.info("kvgraph: which layers prompts have is read off the borders of their messages")
    return table.text()


# Learns from a chat template by which marks answers end.
#
# The template writes two conversations, one with an answer in prose and one with a tool call.
# Where they part, the call begins; what stands before its tool's name opens calls; what stands
# behind its arguments closes them, up to the token that ends the prose's turn too.

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


# By which marks the answers of an engine end: stated by an operator, or learned.


def engine_marks(config: VllmConfig, chat_template: str | None = None) -> str:
    """The marks as they are handed to the scheduler's process; empty if there are none.

    Never raises: an engine whose template cannot be read has no marks.
    """
    if not reads_ends():
        return ""
    try:
        marks = handed_over({}, os.environ)
        if marks is None or not marks.are_of(str(config.model_config.model)):
            marks = learn_marks(config, chat_template)
    except Exception:
        logger.debug("kvgraph: the chat template could not be tried", exc_info=True)
        return ""
    if marks is None:
        logger.debug("kvgraph: the chat template writes no tool calls")
        return ""
    logger.info("kvgraph: tool calls and ends of turns are read off the ends of answers")
    return marks.text()
