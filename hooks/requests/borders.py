"""Reads a prompt's layers off the tokens with which its chat template begins messages."""

from __future__ import annotations

import hmac
import json
import logging
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Annotated, Any, Final, NamedTuple

import msgspec

from ...graph.types import LAYER_BY_NAME, LAYER_NAMES, SourceLayer
from ..settings import LAYERS_KEY, LAYERS_VARIABLE, SECTIONS_VARIABLE

logger = logging.getLogger(__name__)

LONGEST_BORDER: Final = 24  # tokens; chosen
SECTIONS: Final = {
    f"[{name.upper()}]": name
    for name in ("axioms", "identity", "rules", "capabilities", "context", "memories", "affect")
}
"""Lines that begin a section of a system text, unless ``AITHER_KVCACHE_SECTIONS`` replaces them."""

_Layer = Annotated[int, msgspec.Meta(ge=0, le=9)]
_Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class Border(msgspec.Struct, frozen=True, array_like=True):
    """Tokens after which a layer begins."""

    layer: _Layer  # ``types.SourceLayer``
    # The tokens that the template writes at the start of such a message.
    tokens: Annotated[tuple[_Token, ...], msgspec.Meta(min_length=1, max_length=LONGEST_BORDER)]


class BorderTable(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The borders between messages in one model's chat template."""

    # Borders that begin with a special token, and count wherever that token is real.
    borders: Annotated[tuple[Border, ...], msgspec.Meta(max_length=64)]
    # Borders of plain text, which count only before the first user message.
    inner: Annotated[tuple[Border, ...], msgspec.Meta(max_length=16)] = ()
    sealed: bool = False  # whether a special token's name, typed as text, never becomes that token
    # Whether the template places a system text inside one of the last user turns, not the first.
    system_last: bool = False
    # Lines that begin a section of a system text, each with the section's layer.
    sections: Annotated[tuple[tuple[_Text, _Layer], ...], msgspec.Meta(max_length=64)] = ()
    proof: str = ""  # secret that shows that marks come from this server's API process
    model: str = ""  # the model that the table belongs to

    @property
    def has_system(self) -> bool:
        """Whether system texts have a border of their own. If not, they are parts of user turns."""
        return any(border.layer <= LAYER_BY_NAME["rules"] for border in self.borders)

    def are_of(self, model: str) -> bool:
        """Return whether the table applies to an engine of this model."""
        return self.model in ("", model)

    def text(self) -> str:
        return msgspec.json.encode(self).decode()


def read_table(text: str) -> BorderTable:
    """Parse the JSON of ``BorderTable.text``; raises ValueError."""
    return msgspec.json.decode(text, type=BorderTable)


def configured_table(
    extra_config: Mapping[str, Any], environment: Mapping[str, str]
) -> BorderTable | None:
    """Return the connector's or environment's table; None without; a bad one is warned of."""
    text = str(extra_config.get(LAYERS_KEY) or environment.get(LAYERS_VARIABLE) or "")
    if not text.strip().startswith("{"):  # 1 or 0 is the operator's switch, and no table
        return None
    try:
        return read_table(text)
    except (ValueError, RecursionError) as error:
        logger.warning("kvgraph: %s is not understood: %s; ignored", LAYERS_VARIABLE, error)
        return None


def stated_sections(environment: Mapping[str, str]) -> dict[str, int]:
    """Return the operator's section lines and their layers, or the defaults. A malformed value
    leaves a warning, and the defaults count.
    """
    try:
        return read_sections(environment.get(SECTIONS_VARIABLE, "").strip())
    except ValueError as error:
        logger.warning("kvgraph: %s; the defaults are taken", error)
        return read_sections("")


def read_sections(text: str) -> dict[str, int]:
    """Parse section lines and their layers, or return the defaults for no text; raises
    ValueError.
    """
    try:
        stated = json.loads(text) if text else SECTIONS
        return {_line(line): int(LAYER_BY_NAME[layer]) for line, layer in stated.items()}
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError):
        raise ValueError(
            f"{SECTIONS_VARIABLE}={text[:80]!r} must be a JSON object of lines and their layers "
            f"({', '.join(LAYER_NAMES)})"
        ) from None


def _line(text: object) -> str:
    if not isinstance(text, str) or not 0 < len(text.strip()) <= 64:
        raise ValueError("a section begins with a line of at most 64 characters")
    return text.strip()


_AT_ONCE: Final = 32  # tokens that are looked at together: the fastest, by measurement
_SLICE: Final = 4096  # tokens searched back for the last border at a time; chosen
USER: Final = int(SourceLayer.USER_TURN)


class Run(NamedTuple):
    """Tokens ``[start, end)`` of one layer."""

    layer: int
    start: int
    end: int


class BorderMatch(NamedTuple):
    """A border that begins at ``start``; its layer's text begins at ``end``."""

    layer: int
    start: int
    end: int


class LayerReader:
    """Finds borders among tokens."""

    def __init__(self, table: BorderTable) -> None:
        self._strong = _by_first_token(table.borders)
        self._inner = _by_first_token(table.inner)
        self._ends_tools = any(each.layer != SourceLayer.CAPABILITIES for each in table.inner)
        self.first_tokens = frozenset(self._strong)

    def stream(self, tokens: Sequence[int], known: int = 0) -> list[Run]:
        """Return the layers of a prompt when only its tokens are known.

        A client can type borders too: a tokenizer may turn the typed name of a special token into
        that token. So borders count in full only before the first user message. A later border
        never ranks above a tool's result.

        Args:
            known: Number of tokens whose layers earlier calls returned. The part before the first
                user message is always returned again.
        """
        head = self._head(tokens)
        runs = _runs(head.found, head.end)
        first = max(head.end, known)
        if first < len(tokens):
            before = self._last_before(tokens, head.end, first)
            found = [BorderMatch(before, first, first), *self.strong(tokens, first)]
            runs += _runs([_demoted(each) for each in found], len(tokens))
        return runs

    def marked(self, tokens: Sequence[int], forged: Collection[int], tools: bool) -> list[Run]:
        """Return the layers of a prompt when its messages are known.

        Args:
            forged: Positions where a message's author typed the first token of a border.
            tools: Whether the prompt describes tools; if so, the first text that describes them
                gets their layer.
        """
        real = (each for each in self.strong(tokens) if each.start not in forged)
        found = list(_without_mentions(real))
        if tools:
            found += self._of_tools(tokens, found)
        return _runs(sorted(found, key=lambda each: each.start), len(tokens))

    def strong(self, tokens: Sequence[int], first: int = 0) -> Iterator[BorderMatch]:
        """Yield the borders that begin with special tokens, at or after position ``first``."""
        end = first
        for place in _places(tokens, self._strong, first, len(tokens)):
            found = _longest(tokens, place, self._strong) if place >= end else None
            if found is not None:
                end = found.end
                yield found

    def _head(self, tokens: Sequence[int]) -> _Head:
        found: list[BorderMatch] = []
        for each in _without_mentions(self.strong(tokens)):
            if each.layer >= SourceLayer.TOOL_RESULT:
                return self._with_inner(tokens, found, each.start)
            found.append(each)
        return self._with_inner(tokens, found, found[-1].start if found else 0)

    def _with_inner(self, tokens: Sequence[int], found: list[BorderMatch], end: int) -> _Head:
        found = [each for each in found if each.start < end]
        if found:
            found += self._text_borders(tokens, found[0].end, end)
        return _Head(sorted(found, key=lambda each: each.start), end)

    def _of_tools(self, tokens: Sequence[int], strong: Sequence[BorderMatch]) -> list[BorderMatch]:
        """Return the text borders that begin and end the description of tools, where no special
        token begins it.
        """
        user = next((each.start for each in strong if each.layer == USER), len(tokens))
        begun, found = _first_of_tools(strong), list[BorderMatch]()
        if begun is None:
            begun = _first_of_tools(self._text_borders(tokens, 0, len(tokens)))
            if begun is None:
                return []
            found.append(begun)
        late = begun.start > user
        behind = self._text_borders(tokens, begun.end, len(tokens) if late else user)
        if self._ends_tools:
            ended = next((each for each in behind if each.layer != SourceLayer.CAPABILITIES), None)
            if ended is not None and late is (ended.layer == USER):
                found.append(ended)
        return found

    def _text_borders(self, tokens: Sequence[int], first: int, end: int) -> Iterator[BorderMatch]:
        for place in _places(tokens, self._inner, first, end):
            found = _longest(tokens, place, self._inner)
            if found is not None:
                yield found

    def _last_before(self, tokens: Sequence[int], first: int, end: int) -> int:
        """Return the layer of the last border in ``tokens[first:end]``; a user's without one."""
        last: int | None = None
        while end > first:
            start = max(first, end - _SLICE)
            for each in self.strong(tokens, start):
                if each.start >= end:
                    break
                last = each.layer
            if last is not None:
                return last
            end = start
        return USER


class _Head(NamedTuple):
    found: list[BorderMatch]
    end: int


_Borders = dict[int, list[Border]]


def _without_mentions(found: Iterable[BorderMatch]) -> Iterator[BorderMatch]:
    """Drop borders of answers before the first user message: a template explains them there."""
    head, begun = False, False
    for each in found:
        begun |= each.layer in (USER, SourceLayer.TOOL_RESULT)
        if head and not begun and each.layer == SourceLayer.GENERATION:
            continue
        head |= each.layer < SourceLayer.TOOL_RESULT
        yield each


def _by_first_token(borders: Sequence[Border]) -> _Borders:
    found: _Borders = {}
    for border in sorted(borders, key=lambda each: -len(each.tokens)):
        found.setdefault(border.tokens[0], []).append(border)
    return found


def _first_of_tools(found: Iterable[BorderMatch]) -> BorderMatch | None:
    return next((each for each in found if each.layer == SourceLayer.CAPABILITIES), None)


def _places(tokens: Sequence[int], borders: _Borders, first: int, end: int) -> Iterator[int]:
    """Yield positions in ``tokens[first:end]`` where a border may begin."""
    wanted = frozenset(borders)
    for start in range(first, end if wanted else first, _AT_ONCE):
        part = tokens[start : min(start + _AT_ONCE, end)]
        if not wanted.isdisjoint(part):
            yield from (start + at for at, token in enumerate(part) if token in wanted)


def _longest(tokens: Sequence[int], place: int, borders: _Borders) -> BorderMatch | None:
    for border in borders[tokens[place]]:
        end = place + len(border.tokens)
        if tuple(tokens[place:end]) == border.tokens:
            return BorderMatch(border.layer, place, end)
    return None


def _demoted(found: BorderMatch) -> BorderMatch:
    """Return a border after the first user message, ranked no higher than a tool's result."""
    return found if found.layer >= SourceLayer.TOOL_RESULT else found._replace(layer=USER)


def _runs(found: Sequence[BorderMatch], end: int) -> list[Run]:
    starts = [each.start for each in [*found, BorderMatch(USER, end, end)][1:]]
    layered = [(each.layer, each.start, stop) for each, stop in zip(found, starts, strict=True)]
    runs: list[Run] = []
    for layer, start, stop in layered:
        if runs and runs[-1].layer == layer:
            runs[-1] = runs[-1]._replace(end=stop)
        elif stop > start:
            runs.append(Run(layer, start, stop))
    return runs


Decode = Callable[[Sequence[int]], str]

_PART: Final = 64  # tokens decoded together; chosen
_BEFORE: Final = 8
"""Tokens before a part that are decoded with it, since a character may span several tokens and a
text's first token may lose a space. Chosen."""


class TokenPlaces:
    """Maps characters of decoded text to tokens, without offsets, decoding in few parts."""

    def __init__(self, decode: Decode, tokens: Sequence[int]) -> None:
        self._decode = decode
        self._tokens = tokens
        self._begins = [0]  # characters before each part
        for start in range(0, len(tokens), _PART):
            self._begins.append(self._begins[-1] + self._characters(start, start + _PART))
        # Characters of all parts; if it differs from the whole text's length, this tokenizer's
        # parts do not add up, and no position is valid.
        self.length = self._begins[-1]

    def of(self, place: int) -> int:
        """Return the index of the token that holds the character at ``place``."""
        part = min(bisect_right(self._begins, place), len(self._begins) - 1) - 1
        start = part * _PART
        counts = range(1, min(_PART, len(self._tokens) - start) + 1)
        wanted = place + 1 - self._begins[part]
        return start + bisect_left(
            counts, wanted, key=lambda count: self._characters(start, start + count)
        )

    def _characters(self, start: int, end: int) -> int:
        before = list(self._tokens[max(0, start - _BEFORE) : start])
        return len(self._decode([*before, *self._tokens[start:end]])) - len(self._decode(before))


MARKS_KEY: Final = "kvgraph_layers"  # in ``kv_transfer_params``, and beside a rendered prompt
MOST_RUNS: Final = 8192  # runs of one prompt; chosen


def marks_of(proof: str, runs: Sequence[Run]) -> dict[str, Any]:
    """Return a prompt's layers as marks, to be sent from the API process to the scheduler's."""
    flat = [number for run in runs[:MOST_RUNS] for number in run]
    return {"proof": proof, "runs": flat}


def proven_marks(params: object, proof: str) -> list[int] | None:
    """Return the marks in ``kv_transfer_params``; None unless our API process made them."""
    marks = params.get(MARKS_KEY) if isinstance(params, dict) else None
    if not isinstance(marks, dict) or not proof:
        return None
    presented, flat = marks.get("proof"), marks.get("runs")
    if not isinstance(presented, str) or not isinstance(flat, list):
        return None
    same = hmac.compare_digest(presented.encode("utf-8", "replace"), proof.encode())
    return flat if same else None


def runs_of(marks: Sequence[int]) -> list[Run]:
    return [Run(*marks[at : at + 3]) for at in range(0, len(marks) - 2, 3)]


def decoder(tokenizer: Any) -> Callable[[Sequence[int]], str]:
    """Return what decodes tokens, special ones too; without a tokenizer, to ""."""

    def decode(tokens: Sequence[int]) -> str:
        if tokenizer is None or not len(tokens):
            return ""
        return str(tokenizer.decode(list(tokens), skip_special_tokens=False))

    return decode
