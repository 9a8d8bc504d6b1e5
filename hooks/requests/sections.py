"""Splits a system text by its own section markers, such as ``[RULES]`` on a line of their own."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Sequence
from itertools import islice
from typing import Final

import numpy as np
from cachetools import LRUCache

from ...graph.types import SourceLayer
from .borders import BorderTable, Decode, Run, TokenPlaces

_REMEMBERED: Final = 256  # system texts whose sections are remembered; chosen
_LONGEST: Final = 65_536  # longest system text that is split, in tokens; chosen
_MOST: Final = 64  # sections per text; the last one extends to the end of the text. Chosen

Sections = tuple[tuple[int, int], ...]
"""Layers, and the tokens from the start of a text on at which they begin."""


class SectionSplitter:
    """Finds the sections of system texts, and remembers texts already split."""

    def __init__(self, table: BorderTable, decode: Decode) -> None:
        self._layers = dict(table.sections)
        lines = "|".join(re.escape(line) for line in sorted(self._layers, key=len, reverse=True))
        self._pattern = re.compile(rf"^[ \t]*({lines})", re.MULTILINE) if lines else None
        self._decode = decode
        self._known: LRUCache[bytes, Sections] = LRUCache(_REMEMBERED)

    def split(self, tokens: Sequence[int], runs: Sequence[Run]) -> list[Run]:
        """Return ``runs``, with the runs of system texts split at their sections."""
        split: list[Run] = []
        for run in runs:
            is_system = run.layer == SourceLayer.RULES and run.end - run.start <= _LONGEST
            split += self._split(tokens, run) if is_system and self._pattern else [run]
        return split

    def _split(self, tokens: Sequence[int], run: Run) -> list[Run]:
        parts = [(run.layer, 0), *self._sections(tokens[run.start : run.end])]
        ends = [start for _, start in parts[1:]] + [run.end - run.start]
        return [
            Run(layer, run.start + start, run.start + end)
            for (layer, start), end in zip(parts, ends, strict=True)
            if start < end
        ]

    def _sections(self, tokens: Sequence[int]) -> Sections:
        key = hashlib.blake2b(np.asarray(tokens, dtype=np.int64).tobytes()).digest()
        if key not in self._known:
            self._known[key] = self._read(tokens)
        return self._known[key]

    def _read(self, tokens: Sequence[int]) -> Sections:
        assert self._pattern is not None
        text = self._decode(tokens)
        found = [*islice(self._pattern.finditer(text), _MOST)]
        places = TokenPlaces(self._decode, tokens) if found else None
        if places is None or places.length != len(text):
            return ()
        return tuple((self._layers[each[1]], places.of(each.start(1))) for each in found)
