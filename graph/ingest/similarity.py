"""Learns CO_ATTEND edges (blocks attended together) and SEMANTIC edges (similar key embeddings)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import combinations
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..tables.blocks import Mask
from ..tables.tables import Tables
from ..types import NO_ROW, Authority, BlockFlag, EdgeType, Rows, as_keys
from ..wire.events import BlocksAttended, BlocksEmbedded

_MAX_BLOCKS_A_STEP: Final = 16  # the most attended blocks of a step: 120 pairs; chosen
_FADES_S: Final = 60.0  # seconds between two decays of all edges; chosen
_PART: Final = 1 << 15  # edges decayed in one slice; chosen
_FLOOR: Final = 0.05
_MOST_MASS: Final = 1e6  # a share is at most 1, summed over heads and layers; chosen
_EMA_SHARE: Final = 0.2  # weight of the newest sample in the mean attention; chosen
_MUCH: Final = 2.0  # times the mass of a block under uniform attention; chosen
_GAIN: Final = 0.05  # share of what importance lacks to the maximum, added per sample; chosen
_MOST_IMPORTANT: Final = np.float32(0.8)  # most importance that attention gives a block; chosen
_KIND: Final = EdgeType.CO_ATTEND
_NOTHING: Final = np.empty(0, dtype="<f4")


class CoAttendance:
    """Counts block pairs until they make an edge, which then carries the decaying count."""

    def __init__(self, tables: Tables, counters: Counter[str]) -> None:
        self._tables = tables
        self._counters = counters
        self._counts: dict[tuple[int, int], int] = {}
        self._faded: float | None = None

    def attended(self, engine: int, event: BlocksAttended, now: float) -> None:
        """Apply one sampled decode step: the blocks read, each with its attention mass."""
        whole = len(event.mass) % 4 == 0 and len(event.hashes) == 2 * len(event.mass)
        mass = np.frombuffer(event.mass, dtype="<f4") if whole else _NOTHING
        if not whole or not ((mass >= 0) & (mass <= _MOST_MASS)).all():
            self._counters["events_refused"] += 1
            return
        blocks = self._tables.blocks
        found = blocks.find(as_keys(event.hashes), self._tables.salt(engine))
        rows, first = np.unique(found, return_index=True)
        mass, rows = mass[first][rows != NO_ROW], rows[rows != NO_ROW]
        blocks.last_attended[rows] = now
        attention = blocks.for_writing("attention")
        attention[rows] += _EMA_SHARE * (mass - attention[rows])
        self._raise(rows[mass > _MUCH / max(1, len(mass))])
        self.observe(rows, mass, now)

    def _raise(self, rows: Rows) -> None:
        """Raise the importance of highly attended blocks, unless it was stated."""
        blocks = self._tables.blocks
        rows = rows[blocks.stated[rows] == int(Authority.INFERRED)]
        lacking = _MOST_IMPORTANT - blocks.importance[rows]
        blocks.importance[rows] += np.float32(_GAIN) * np.maximum(lacking, 0)

    def observe(self, rows: Rows, mass: npt.NDArray[np.float32], now: float) -> None:
        """Count one sampled step that read these distinct block rows with this softmax mass."""
        top = np.sort(rows[np.argsort(-mass, kind="stable")[:_MAX_BLOCKS_A_STEP]])
        pairs = np.array(list(combinations(top.tolist(), 2)), dtype=np.int32).reshape(-1, 2)
        weights = self._tables.edges.weight_between(_KIND, pairs[:, 0], pairs[:, 1])
        known = weights > 0
        self._write(pairs[known], weights[known] + 1, now)
        ripe = [pair for pair in map(tuple, pairs[~known].tolist()) if self._count(pair)]
        after = self._tables.limits.co_attend_after
        self._write(
            np.array(ripe, dtype=np.int32).reshape(-1, 2),
            np.full(len(ripe), after, dtype=np.float32),
            now,
        )

    def fading(self, now: float) -> Iterator[None]:
        """Decay all edges once a minute, in slices; no event may be applied meanwhile."""
        if self._faded is None:
            self._faded = now
        elapsed = now - self._faded
        if elapsed < _FADES_S:
            return
        self._faded, edges = now, self._tables.edges
        factor = 0.5 ** (elapsed / self._tables.limits.co_attend_half_life_s)
        for start in range(0, edges.size if edges.counts[_KIND] else 0, _PART):
            edges.decay(_KIND, factor, _FLOOR, now, slice(start, start + _PART))
            yield

    def forget(self, gone: Mask) -> None:
        """Forget the ``gone`` rows, bool ``[blocks.size]``, which are about to be reused."""
        if self._counts:
            lost = gone.tobytes()
            self._counts = {
                pair: count
                for pair, count in self._counts.items()
                if not (lost[pair[0]] or lost[pair[1]])
            }

    def _count(self, pair: tuple[int, int]) -> bool:
        """Count a pair once more; true if it becomes an edge and is no longer counted."""
        count = self._counts.pop(pair, 0) + 1
        if count >= self._tables.limits.co_attend_after:
            return True
        self._counts[pair] = count  # at the end: the dict keeps the longest untouched first
        if len(self._counts) > self._tables.limits.max_pairs:
            del self._counts[next(iter(self._counts))]
        return False

    def _write(self, pairs: Rows, weights: npt.NDArray[np.float32], now: float) -> None:
        if len(pairs):
            self._tables.edges.upsert(_KIND, pairs[:, 0], pairs[:, 1], weights, now)


Vectors = npt.NDArray[np.float32]


class SemanticLinker:
    """Keeps one embedding per block and links similar ones; the index is built on first use."""

    def __init__(self, tables: Tables, counters: Counter[str]) -> None:
        self._tables = tables
        self._counters = counters
        self._index: Any = None
        self._dim = 0

    @property
    def nbytes(self) -> int:
        return int(self._index.memory_usage) if self._index is not None else 0

    def accepts(self, dim: int) -> bool:
        """Return whether vectors of this width fit those already stored."""
        return self._dim in (0, dim)

    def embedded(self, engine: int, event: BlocksEmbedded, now: float) -> None:
        """Apply embeddings of blocks; zero and non-finite ones are skipped."""
        count = len(event.hashes) // 8
        fits = len(event.hashes) % 8 == 0 and len(event.vectors) == 2 * event.dim * count
        if not count or not fits or not self.accepts(event.dim):
            self._counters["events_refused"] += 1
            return
        vectors = np.frombuffer(event.vectors, dtype="<f2").reshape(count, event.dim)
        with np.errstate(invalid="ignore"):  # signalling NaNs: they are sorted out below
            vectors = vectors.astype(np.float32)
        found = self._tables.blocks.find(as_keys(event.hashes), self._tables.salt(engine))
        rows, first = np.unique(found, return_index=True)
        usable = (rows != NO_ROW) & np.isfinite(vectors[first]).all(1)
        usable[usable] = vectors[first[usable]].any(1)
        if usable.any():
            self.embed(rows[usable], vectors[first[usable]], now)

    def embed(self, rows: Rows, vectors: Vectors, now: float) -> None:
        """Set the embedding of each (distinct) block row, float32 ``[n, dim]``, finite and
        non-zero, and link it to its neighbours; ``accepts(dim)`` must hold.
        """
        index = self._ensure(vectors.shape[1])
        self._drop(rows)
        index.add(rows.astype(np.uint64), vectors)
        self._tables.blocks.flag(rows, BlockFlag.EMBEDDED)
        sources, targets, cosines = self._near(index, rows, vectors)
        if sources.size:
            low, high = np.minimum(sources, targets), np.maximum(sources, targets)
            self._tables.edges.upsert(EdgeType.SEMANTIC, low, high, cosines, now)

    def vectors(self) -> dict[str, npt.NDArray[Any]]:
        """Return all embeddings: ``rows`` int32 ``[n]`` and ``vectors`` float16 ``[n, dim]``."""
        if self._index is None:
            return {}
        blocks = self._tables.blocks
        embedded = blocks.flagged(np.s_[: blocks.size], BlockFlag.EMBEDDED)
        rows = np.flatnonzero(embedded).astype(np.int32)
        found = np.asarray(self._index.get(rows.astype(np.uint64)), dtype=np.float16)
        return {"rows": rows, "vectors": found.reshape(len(rows), self._dim)}

    def load_vectors(self, vectors: dict[str, npt.NDArray[Any]]) -> None:
        """Restore the result of ``vectors()``; the edge store restores the edges."""
        self._tables.blocks.unflag(np.s_[:], BlockFlag.EMBEDDED)
        if vectors and len(vectors["rows"]):
            rows, values = vectors["rows"], vectors["vectors"].astype(np.float32)
            self._ensure(values.shape[1]).add(rows.astype(np.uint64), values)
            self._tables.blocks.flag(rows, BlockFlag.EMBEDDED)

    def forget(self, rows: Rows) -> None:
        if self._index is not None:
            self._drop(rows)

    def _ensure(self, dim: int) -> Any:
        if self._index is None:
            from usearch.index import Index  # imported on use: most engines send no embeddings

            self._index, self._dim = Index(ndim=dim, metric="cos", dtype="f16"), dim
        return self._index

    def _drop(self, rows: Rows) -> None:
        embedded = rows[self._tables.blocks.flagged(rows, BlockFlag.EMBEDDED)]
        if embedded.size:
            self._index.remove(embedded.astype(np.uint64))
            self._tables.blocks.unflag(embedded, BlockFlag.EMBEDDED)

    def _near(
        self, index: Any, rows: Rows, vectors: Vectors
    ) -> tuple[Rows, Rows, npt.NDArray[np.float32]]:
        limits = self._tables.limits
        count = min(limits.semantic_neighbors + 1, len(index))  # a block finds itself first
        matches = index.search(vectors, count)
        keys = np.asarray(matches.keys).reshape(len(rows), -1)
        cosines = 1.0 - np.asarray(matches.distances, dtype=np.float32).reshape(keys.shape)
        targets = keys.astype(np.int64)
        sources = np.repeat(rows.astype(np.int64), keys.shape[1]).reshape(keys.shape)
        blocks = self._tables.blocks
        near = (cosines > limits.semantic_threshold) & (targets != sources)
        for owner in (blocks.tenant, blocks.salt):  # what is one's is nothing to another
            near &= owner[sources] == owner[targets]
        return (
            sources[near].astype(np.int32),
            targets[near].astype(np.int32),
            cosines[near].astype(np.float32),
        )
