"""What source layers and edges are worth: configured weights first, then what comes back."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ...graph.blocks import Picked
from ...graph.scoring import ScoreProfile, graph_worth
from ...graph.tables import Tables
from ...graph.types import NUM_EDGE_TYPES, Keys, SourceLayer
from .hazard import Floats

Mask = npt.NDArray[np.bool_]
Rate = Callable[[Picked], Floats]

STEER: Final = 0.35
"""Natural logarithm of the most that the graph counts, either way: it steers, and cannot drown
time. Chosen."""
_WORTH: Final = 40.0  # points of the configured weights that count for three quarters of it; chosen
_USUAL_WORTH: Final = 10.0  # points of an ordinary block of a conversation
_LAYERS: Final = len(SourceLayer)
_KINDS: Final = _LAYERS + NUM_EDGE_TYPES
_SLIGHT: Final = 0.01  # a learned worth below this is not looked at; chosen
_SAMPLE: Final = 512  # blocks in one look; chosen
_LOOK_S: Final = 30.0  # model seconds from one look to the next; chosen
_STRENGTH: Final = 100.0  # returns that the configured weights count for; chosen
_FADE: Final = 0.99  # of what was counted, a look; chosen


class Worth:
    """Learns, by layer and by edge type, how much oftener such blocks are asked for than expected.

    Now and then some blocks are noted with the rate at which they should be asked for by their
    sessions alone; a while later it is counted which were. A kind of block that came back as often
    as others, by what was expected of it, is worth what the weights say; one that came back twice
    as often is worth more, up to ``STEER``.
    """

    def __init__(self) -> None:
        self._asked = np.zeros(_KINDS)
        self._expected = np.zeros(_KINDS)
        self._total = np.zeros(2)  # asked, expected: of all blocks
        self._noted: _Noted | None = None

    def observe(self, tables: Tables, now: float, speed: float, rate: Rate) -> None:
        """Look at what became of the blocks that were noted, and note others.

        Args:
            speed: Model seconds in one second here.
            rate: 1/model second, of picked blocks, without edges and layers.
        """
        if self._noted is not None and (now - self._noted.at) * speed < _LOOK_S:
            return
        if self._noted is not None:
            self._count(tables, self._noted, (now - self._noted.at) * speed)
        picked = tables.blocks.sample(_SAMPLE)
        picked = Picked(tables.blocks, picked.rows[tables.blocks.alive[picked.rows]])
        keys = tables.blocks.keys[picked.rows]
        self._noted = _Noted(now, picked, keys, _kinds(tables, picked), np.asarray(rate(picked)))

    def steered(self, tables: Tables, profile: ScoreProfile, picked: Picked, now: float) -> Floats:
        """float64 ``[n]``: ln of the factor by which each one's rate of return is steered."""
        points = graph_worth(tables, profile, picked, now)
        stated = STEER * np.tanh((points - _USUAL_WORTH) / _WORTH)
        learned = self.learned()
        stated += np.take(learned, picked.of(tables.blocks.layer))
        for kind in np.flatnonzero(np.abs(learned[_LAYERS:]) > _SLIGHT):
            stated += learned[_LAYERS + kind] * (picked.of(tables.blocks.degree[kind]) > 0)
        return np.asarray(np.clip(stated, -STEER, STEER, out=stated))

    def learned(self) -> Floats:
        """float64 ``[layers + edge types]``: ln of what each kind is worth beside its weight."""
        if not self._total.all():
            return np.zeros(_KINDS)
        expected = self._expected * self._total[0] / self._total[1]
        return np.asarray(np.log((self._asked + _STRENGTH) / (expected + _STRENGTH)))

    def _count(self, tables: Tables, noted: _Noted, lasted: float) -> None:
        asked, kinds = noted.asked(tables), noted.kinds
        expected = -np.expm1(-noted.rate * lasted)
        same = noted.same(tables)
        asked, expected, kinds = asked[same], expected[same], kinds[same]
        self._asked = _FADE * self._asked + asked @ kinds
        self._expected = _FADE * self._expected + expected @ kinds
        self._total = _FADE * self._total + (asked.sum(), expected.sum())


@dataclass(frozen=True, slots=True)
class _Noted:
    """Some blocks, and what was expected of each."""

    at: float
    picked: Picked
    keys: Keys
    kinds: Floats
    rate: Floats

    def same(self, tables: Tables) -> Mask:
        """bool ``[n]``: the rows that still mean the same block."""
        rows = self.picked.rows
        return np.asarray((tables.blocks.keys[rows] == self.keys) & tables.blocks.alive[rows])

    def asked(self, tables: Tables) -> Mask:
        """bool ``[n]``: those that a request walked since."""
        return np.asarray(tables.blocks.last_attended[self.picked.rows] > self.at)


def _kinds(tables: Tables, picked: Picked) -> Floats:
    """float64 ``[n, layers + edge types]``: 1 where a block is of a kind."""
    blocks = tables.blocks
    layers = picked.of(blocks.layer)[:, None] == np.arange(_LAYERS)
    edges = np.take(blocks.degree, picked.rows, axis=1).T > 0
    return np.concatenate([layers, edges], axis=1).astype(np.float64)
