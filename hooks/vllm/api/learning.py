"""Learns a template's borders and end marks: vLLM's renderer renders test conversations."""

from __future__ import annotations

import contextlib
import copy
import logging
import os
import re
import secrets
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Sequence
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
from ...requests.ends import BRACKETS, EndMarks, configured_marks
from ...settings import engine_settings

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
"""Ids of a call: some templates require nine letters and digits, some write only this form."""

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
    """Renders test conversations as the API process will render real ones.

    Raises whatever vLLM raises if a model has no tokenizer or no renderer.
    """

    def __init__(self, config: VllmConfig, chat_template: str | None = None) -> None:
        from vllm.renderers import renderer_from_config

        self._renderer = renderer_from_config(_of_text_alone(config))
        self._template = chat_template
        self._tokenizer = self._renderer.get_tokenizer()
        # special tokens, which stay the same whatever is beside them
        self.special = special_tokens(self._tokenizer)
        self.text = decoder(self._tokenizer)  # decodes tokens, special ones included

    def close(self) -> None:
        self._renderer.shutdown()

    @property
    def end(self) -> int | None:
        end: int | None = self._tokenizer.eos_token_id
        return end

    def answered(self) -> list[int]:
        """Return the tokens of a conversation that continues after an answer in prose."""
        answer = {"role": "assistant", "content": ANSWER}
        return self.render([ASKED, answer, {"role": "user", "content": RESULT}])

    def called(self, call_id: str, with_result: bool = True) -> list[int]:
        """Return the tokens of a conversation with a tool call, and its result if wanted."""
        return self.render([ASKED, *called(call_id)[: None if with_result else 1]])

    def render(self, messages: Sequence[Message], tools: bool = True) -> list[int]:
        """Return the tokens of a conversation, with the tool's description if ``tools``."""
        from vllm.renderers import ChatParams

        asked = {
            "tools": copy.deepcopy(_TOOLS) if tools else None,
            "tokenize": True,
            "add_generation_prompt": False,
            "continue_final_message": False,
        }
        params = ChatParams(chat_template=self._template, chat_template_kwargs=asked)
        with _quiet():
            _, prompt = self._renderer.render_messages(copy.deepcopy(list(messages)), params)
        tokens = prompt.get("prompt_token_ids")
        if tokens is None:
            tokens = self._tokenizer.encode(prompt["prompt"], add_special_tokens=False)
        return list(tokens)


def called(call_id: str) -> list[Message]:
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
    last: bool = False,  # search for the last occurrence instead of the first
) -> int | None:
    """Return the token in which ``text`` begins, or with ``end`` the next; None if absent."""
    whole = probes.text(tokens[first:])
    at = whole.rfind(text) if last else whole.find(text)
    if at < 0:
        return None
    wanted = at + (len(text) if end else 1)
    stops = range(first + 1, len(tokens))
    stop = bisect_left(stops, wanted, key=lambda to: len(probes.text(tokens[first:to])))
    return first + stop + end


def special_tokens(tokenizer: Any) -> frozenset[int]:
    """Return the tokens that stay the same whatever text surrounds them."""
    found = set(tokenizer.all_special_ids)
    with contextlib.suppress(Exception):  # not every tokenizer of vLLM's has it
        found.update(tokenizer.get_added_vocab().values())
    return frozenset(found)


def _of_text_alone(config: VllmConfig) -> VllmConfig:
    """Return the configuration without multimodal processors, which are not needed here."""
    text = copy.copy(config)
    text.model_config = copy.copy(config.model_config)
    text.model_config.multimodal_config = None
    return text


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Silence vLLM's log of templates that refuse a test conversation."""
    logger = logging.getLogger("vllm.renderers.hf")
    logger.addFilter(_nothing)
    try:
        yield
    finally:
        logger.removeFilter(_nothing)


def _nothing(_: logging.LogRecord) -> bool:
    return False


SYSTEM: Final = "Zqsystem"
QUESTION: Final = "Zqquestion"
SECOND: Final = "Zqfurther"


class TemplatePart(NamedTuple):
    """What the template writes before a message's text."""

    layer: SourceLayer  # layer of the text
    # tokens since the end of the text before it, or since the start of the prompt
    before: list[int]


_Wanted = tuple[SourceLayer, str]
_SYSTEM: Final[_Wanted] = (SourceLayer.RULES, SYSTEM)
_SCHEMA: Final = 40  # most tokens from a tool's description to the end of its schema
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


def conversations(probes: Probes) -> Iterator[list[TemplatePart]]:
    """Yield the parts of all the template's conversations, with and without system and tools."""
    for has_system in (True, False):
        for has_tools in (False, True):
            for messages, wanted in _made(has_system):
                with contextlib.suppress(Exception):  # a template may refuse any of them
                    tokens = probes.render(messages, tools=has_tools)
                    yield _parts(probes, tokens, wanted, has_tools)


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
) -> list[TemplatePart]:
    """Return what stands before each wanted text that is found."""
    places = [] if not has_tools else list(_schema(probes, tokens))
    for layer, text in wanted:
        start = text_place(probes, tokens, text, 0)
        if start is not None:
            stop = text_place(probes, tokens, text, 0, end=True) or start
            places.append((start, stop, layer))
    parts, end = [], 0
    for start, stop, layer in sorted(places):
        parts.append(TemplatePart(layer, tokens[end:start]))
        end = max(end, stop)
    return parts


def _schema(probes: Probes, tokens: list[int]) -> Iterator[tuple[int, int, SourceLayer]]:
    """Yield where the tool is described, from its name to the name of its parameter."""
    described = text_place(probes, tokens, DESCRIPTION, 0) or text_place(
        probes, tokens, QUESTION, 0
    )
    named = text_place(probes, tokens[:described], TOOL, 0, last=True)
    if named is None:
        return
    end = text_place(probes, tokens[: (described or 0) + _SCHEMA], KEY, named, end=True)
    yield named, end or named + 1, SourceLayer.CAPABILITIES


# A gap is what the template writes between two messages' texts. A border is the end of a gap,
# starting at its last special token. If two layers would get the same border, it starts one special
# token earlier, and so on.

_PROBED: Final = (TOOL, KEY, *CALL_IDS)
_INNER: Final = 8  # tokens of a text border: too long to occur by chance


def learn_borders(
    config: VllmConfig, sections: dict[str, int], chat_template: str | None = None
) -> BorderTable | None:
    """Return the borders of an engine's model; None if its template shows none."""
    with contextlib.closing(Probes(config, chat_template)) as probes:
        return _borders(probes, sections, str(config.model_config.model))


def _borders(probes: Probes, sections: dict[str, int], model: str) -> BorderTable | None:
    shown = list(conversations(probes))
    if not shown:
        return None
    gaps = [gap for parts in shown for gap in _gaps(probes, parts)]
    _without_ends(gaps)
    borders = _distinct_borders([gap for gap in gaps if gap.starts])
    if not any(border.layer == SourceLayer.USER_TURN for border in borders):
        return None
    inner = {border for gap in gaps if not gap.starts for border in _inner(probes, gap)}
    known = {border.tokens for border in borders}
    return BorderTable(
        borders=tuple(sorted(borders, key=_order)),
        inner=tuple(sorted((each for each in inner if each.tokens not in known), key=_order)),
        sections=tuple(sorted(sections.items())),
        sealed=_is_sealed(probes, borders),
        system_last=any(map(_has_system_last, shown)),
        proof=secrets.token_hex(16),
        model=model,
    )


@dataclass
class _Gap:
    """What stands before a message's text."""

    layer: SourceLayer
    tokens: list[int]  # all tokens of the gap
    cuts: list[int]  # positions where the gap differs between renderings; the last one is its end
    starts: list[int]  # positions of special tokens at which a border may begin, ascending
    is_first: bool  # whether the gap is at the beginning of the prompt

    @property
    def border(self) -> tuple[int, ...]:
        start = self.starts[-1] if self.starts else 0
        end = next((cut for cut in self.cuts if cut > start), len(self.tokens))
        most = _INNER if self.layer is SourceLayer.CAPABILITIES else LONGEST_BORDER
        return tuple(self.tokens[start : min(end, start + most)])


def _gaps(probes: Probes, parts: list[TemplatePart]) -> Iterable[_Gap]:
    """Yield a conversation's gaps; a user's turn that contains the system text begins before it."""
    merged = False
    for part, behind in zip(parts, [*parts[1:], None], strict=True):
        layer = part.layer
        starts = [at for at, token in enumerate(part.before) if token in probes.special]
        if layer is SourceLayer.RULES and behind is not None:
            merged = _is_merged(probes, behind)
            layer = SourceLayer.USER_TURN if merged else layer
        if starts or not merged:
            cuts = [*_cuts(probes, part), len(part.before)]
            yield _Gap(layer, part.before, cuts, starts, part is parts[0])


def _is_merged(probes: Probes, behind: TemplatePart) -> bool:
    """Return whether no special token stands between a system text and the user's."""
    special = any(token in probes.special for token in behind.before)
    return behind.layer is SourceLayer.USER_TURN and not special


def _cuts(probes: Probes, part: TemplatePart) -> list[int]:
    """Positions of what differs from text to text: the test's names, white space at the end."""
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
    """Return whether a token may be a different one before another text."""
    text = probes.text([token])
    return not text.strip() or text[-1].isspace()


def _distinct_borders(gaps: list[_Gap]) -> set[Border]:
    """Return borders long enough that their special tokens tell layers apart."""
    while unclear := _unclear(gaps):
        for gap in unclear:
            if len(gap.starts) > 1:
                gap.starts.pop()
            else:  # indistinguishable: take the least privileged layer
                gap.layer = max(each.layer for each in gaps if each.border == gap.border)
    return {Border(int(gap.layer), gap.border) for gap in gaps}


def _unclear(gaps: list[_Gap]) -> list[_Gap]:
    """Return gaps whose border, or its first token, also begins another layer."""
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


def _has_system_last(parts: list[TemplatePart]) -> bool:
    """Return whether the system text stands after the first of several user texts."""
    layers = [part.layer for part in parts]
    return (
        SourceLayer.RULES in layers
        and SourceLayer.USER_TURN in layers[: layers.index(SourceLayer.RULES)]
    )


def _without_ends(gaps: list[_Gap]) -> None:
    """Remove special tokens that end texts or begin prompts from gaps, where others remain."""
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
    """Yield the text border of a gap without special tokens, if it is long enough."""
    tokens = list(gap.border)
    while tokens and not probes.text(tokens[:1]).strip():
        tokens = tokens[1:]
    if gap.layer is SourceLayer.CAPABILITIES and len(tokens) >= 2:
        yield Border(int(gap.layer), tuple(tokens[:_INNER]))
    elif gap.layer in (SourceLayer.RULES, SourceLayer.USER_TURN) and len(tokens) >= 2:
        yield Border(int(gap.layer), tuple(tokens[-_INNER:]))


def _is_sealed(probes: Probes, borders: Iterable[Border]) -> bool:
    """Return whether a special token's name stays text when a message contains it."""
    user = next(each for each in borders if each.layer == SourceLayer.USER_TURN)
    name = probes.text(user.tokens[:1])
    plain, typed = (
        probes.render([{"role": "user", "content": f"{QUESTION} {text}"}], tools=False)
        for text in ("", f"{name} {name}")
    )
    return typed.count(user.tokens[0]) == plain.count(user.tokens[0])


def _order(border: Border) -> tuple[int, tuple[int, ...]]:
    return border.layer, border.tokens


logger = logging.getLogger(__name__)


def engine_borders(config: VllmConfig, chat_template: str | None = None) -> str:
    """Return the border table for the scheduler's process, as JSON; empty if there is none. Never
    raises: if the template cannot be read, the engine reads no layers.
    """
    if not engine_settings().reads_layers:
        return ""
    return _told(
        lambda: learn_borders(config, stated_sections(os.environ), chat_template),
        "the chat template shows no borders of messages",
        "which layers prompts have is read off the borders of their messages",
    )


def _told(learn: Callable[[], BorderTable | EndMarks | None], nothing: str, something: str) -> str:
    """Return what is learned as JSON, and log that; empty if it is nothing, or fails."""
    try:
        found = learn()
    except Exception:
        logger.debug("kvgraph: the chat template could not be tried", exc_info=True)
        return ""
    if found is None:
        logger.debug("kvgraph: %s", nothing)
        return ""
    logger.info("kvgraph: %s", something)
    return found.text()


# End marks come from two renderings: an answer in prose, and a tool call. The call begins where
# they differ. What precedes its tool's name opens calls; what follows its arguments closes them, up
# to the token that also ends the turn in prose.

_ARGUMENTS_BEGIN: Final = re.compile(r"[\[({]?\s*[\"']?\s*$")
_ARGUMENTS_END: Final = "\"'," + BRACKETS
"""Characters that may end a call's arguments, before the mark that closes the call."""


def learn_marks(config: VllmConfig, chat_template: str | None = None) -> EndMarks | None:
    """Return the end marks of an engine's model; None if its template has no format for tool calls.
    Such a model may call tools in prose, so the end of its answers shows nothing.
    """
    with contextlib.closing(Probes(config, chat_template)) as probes:
        return _marks_of(probes, str(config.model_config.model))


def _marks_of(probes: Probes, model: str) -> EndMarks | None:
    prose = probes.answered()
    ends = _turn_ends(probes, prose)
    for call_id in CALL_IDS:
        with contextlib.suppress(Exception):  # a template that refuses this call may take the next
            if (call := _Call.found(probes, prose, call_id)) is not None:
                return _marks(probes, call, ends, call_id, model)
    return None


class _Call(NamedTuple):
    tokens: list[int]  # the whole conversation
    first: int  # where it differs from an answer in prose
    named: int  # where the tool's name begins
    closed: int  # first token after the call's arguments
    result: int  # where the tool's result begins

    @staticmethod
    def found(probes: Probes, prose: Sequence[int], call_id: str) -> _Call | None:
        """Find the call in a rendering; None if it does not show the tool's name."""
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
    """The tokenizer's end token, and the special token that the template puts after an answer."""
    ends = [] if probes.end is None else [probes.end]
    ended = text_place(probes, prose, ANSWER, 0, end=True)
    behind = [] if ended is None else [token for token in prose[ended:] if token in probes.special]
    return tuple(dict.fromkeys([*ends, *behind[:1]]))


def _opening(probes: Probes, call: _Call) -> tuple[int | None, str, str]:
    """The last special token before a tool's name, the text between, and that before arguments."""
    opening = range(call.first, call.named)
    places = [place for place in opening if call.tokens[place] in probes.special]
    first = places[-1] + 1 if places else call.first
    before, _, rest = probes.text(call.tokens[first : call.closed]).rpartition(TOOL)
    behind, _, _ = rest.partition(KEY)
    return (call.tokens[first - 1] if places else None), before, behind


def _divider(probes: Probes, call: _Call) -> int | None:
    """Return the last special token between the tool's name and the arguments."""
    value = text_place(probes, call.tokens, KEY, call.named) or call.closed
    tokens = call.tokens[call.named : value]
    return next((token for token in reversed(tokens) if token in probes.special), None)


def _closing(
    probes: Probes, call: _Call, ends: tuple[int, ...], call_id: str
) -> tuple[list[int], list[int]]:
    """The tokens that close a call's arguments, and the one that ends an answer after them."""
    behind = call.tokens[call.closed : call.result]
    for place, token in enumerate(behind):
        if token in ends:
            return behind[:place], []
    alone = _without_result(probes, call, call_id)
    further = [token for token in behind[len(alone) :] if token in probes.special]
    return alone, further[:1]


def _without_result(probes: Probes, call: _Call, call_id: str) -> list[int]:
    """Return what stands after a call's arguments if nothing follows, up to a turn's end."""
    with contextlib.suppress(Exception):  # some templates end no conversation with a call
        tokens = probes.called(call_id, with_result=False)
        if tokens[: call.closed] == call.tokens[: call.closed]:
            return tokens[call.closed :]
    behind = call.tokens[call.closed : call.result]
    places = [place for place, token in enumerate(behind) if token in probes.special]
    return behind[: places[0] + 1] if places else []


def _closers(probes: Probes, closing: Sequence[int]) -> tuple[str, ...]:
    """The texts that end a call: final special tokens, or the last word, or a bracket."""
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
    """Return the first position at which two conversations differ."""
    for place, (token, theirs) in enumerate(zip(one, other, strict=False)):
        if token != theirs:
            return place
    return min(len(one), len(other))


def engine_marks(config: VllmConfig, chat_template: str | None = None) -> str:
    """Return the end marks for the scheduler's process, as JSON: the operator's, or learned ones;
    empty without any. Never raises: if the template cannot be read, the engine has no marks.
    """
    if not engine_settings().reads_ends:
        return ""

    def learn() -> EndMarks | None:
        marks = configured_marks({}, os.environ)
        fits = marks is not None and marks.are_of(str(config.model_config.model))
        return marks if fits else learn_marks(config, chat_template)

    return _told(
        learn,
        "the chat template writes no tool calls",
        "tool calls and ends of turns are read off the ends of answers",
    )
