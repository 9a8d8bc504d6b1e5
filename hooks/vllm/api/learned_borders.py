"""Learns from a chat template with which tokens messages of each kind begin.

What the template writes between two messages' texts is a gap. A border is the end of a gap, from
its last special token on; where messages of different kinds would begin with the same border, from
the special token before that one on, and so forth.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from ....graph.types import SourceLayer
from ..layers.border_table import LONGEST_BORDER, Border, BorderTable
from ..layers.token_places import TokenPlaces
from .layer_probes import QUESTION, Conversation, Part, conversations
from .probes import CALL_IDS, KEY, TOOL, Probes

if TYPE_CHECKING:
    from vllm.config import VllmConfig

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
