"""``BorderTable``: with which tokens the messages of a model begin, as its chat template has it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from typing import Annotated, Any, Final

import msgspec

from ....graph.types import LAYER_BY_NAME, LAYER_NAMES
from ..settings import LAYERS_KEY, LAYERS_VARIABLE, OFF, SECTIONS_VARIABLE

logger = logging.getLogger(__name__)

LONGEST_BORDER: Final = 24  # tokens; chosen
SECTIONS: Final = {
    f"[{name.upper()}]": name
    for name in ("axioms", "identity", "rules", "capabilities", "context", "memories", "affect")
}
"""What begins a section of a system text, unless ``AITHER_KVCACHE_SECTIONS`` says otherwise."""

_Layer = Annotated[int, msgspec.Meta(ge=0, le=9)]
_Token = Annotated[int, msgspec.Meta(ge=0, lt=1 << 31)]
_Text = Annotated[str, msgspec.Meta(min_length=1, max_length=64)]


class Border(msgspec.Struct, frozen=True, array_like=True):
    """The tokens behind which a layer begins.

    Attributes:
        layer: ``types.SourceLayer``.
        tokens: What the template writes there.
    """

    layer: _Layer
    tokens: Annotated[tuple[_Token, ...], msgspec.Meta(min_length=1, max_length=LONGEST_BORDER)]


class BorderTable(msgspec.Struct, frozen=True, omit_defaults=True, forbid_unknown_fields=True):
    """The borders of one model's messages.

    Attributes:
        borders: Begin with a special token: they count wherever they are real.
        inner: Of mere text, inside what stands before the first message of a user.
        sealed: Whether a typed name of a special token never becomes that token.
        system_last: Whether a system text that is a part of a user's turn is one of the last.
        sections: The lines that begin a section of a system text, each with its layer.
        proof: What shows that marks were made by this server's API process.
        model: Whose borders they are.
    """

    borders: Annotated[tuple[Border, ...], msgspec.Meta(max_length=64)]
    inner: Annotated[tuple[Border, ...], msgspec.Meta(max_length=16)] = ()
    sealed: bool = False
    system_last: bool = False
    sections: Annotated[tuple[tuple[_Text, _Layer], ...], msgspec.Meta(max_length=64)] = ()
    proof: str = ""
    model: str = ""

    @property
    def has_system(self) -> bool:
        """Whether a border of their own precedes system texts; else they are parts of user
        turns."""
        return any(border.layer <= LAYER_BY_NAME["rules"] for border in self.borders)

    def are_of(self, model: str) -> bool:
        """Whether an engine of this model may go by them."""
        return self.model in ("", model)

    def text(self) -> str:
        """The table as it is handed over: one line of JSON."""
        return msgspec.json.encode(self).decode()


def read_table(text: str) -> BorderTable:
    """What ``BorderTable.text`` gave.

    Raises:
        ValueError: Names the field that is wrong.
    """
    return msgspec.json.decode(text, type=BorderTable)


def handed_over(
    extra_config: Mapping[str, Any], environment: Mapping[str, str]
) -> BorderTable | None:
    """The table that a connector's configuration has, or else the environment; None: nobody has
    one.

    What is malformed leaves a warning, and is ignored.
    """
    text = str(extra_config.get(LAYERS_KEY) or environment.get(LAYERS_VARIABLE) or "")
    if not text.strip().startswith("{") or text.strip().lower() in OFF:
        return None
    try:
        return read_table(text)
    except ValueError as error:
        logger.warning("kvgraph: %s is not understood: %s; ignored", LAYERS_VARIABLE, error)
        return None


def stated_sections(environment: Mapping[str, str]) -> dict[str, int]:
    """The lines that begin sections, and their layers, as an operator states them.

    What is malformed leaves a warning, and the defaults are taken.
    """
    text = environment.get(SECTIONS_VARIABLE, "").strip()
    try:
        stated = json.loads(text) if text else SECTIONS
        return {_line(line): int(LAYER_BY_NAME[layer]) for line, layer in stated.items()}
    except (ValueError, KeyError, AttributeError, TypeError):
        logger.warning(
            "kvgraph: %s must be a JSON object of lines and their layers (%s); the defaults are "
            "taken", SECTIONS_VARIABLE, ", ".join(LAYER_NAMES),
        )  # fmt: skip
        return {line: int(LAYER_BY_NAME[layer]) for line, layer in SECTIONS.items()}


def _line(text: object) -> str:
    if not isinstance(text, str) or not 0 < len(text.strip()) <= 64:
        raise ValueError("a section begins with a line of at most 64 characters")
    return text.strip()
