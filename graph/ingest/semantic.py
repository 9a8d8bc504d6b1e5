"""SEMANTIC edges: near key embeddings of one tenant's and model's blocks, by an ANN index."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt

from ..messages.events import BlocksEmbedded
from ..tables.tables import Tables
from ..types import NO_ROW, BlockFlag, EdgeType, Rows, as_keys

Vectors = npt.NDArray[np.float32]


class SemanticLinker:
    """Keeps one embedding per block and links near ones; created at the first embedding."""

    def __init__(self, tables: Tables, counters: Counter[str]) -> None:
        self._tables = tables
        self._counters = counters
        self._index: Any = None
        self._dim = 0

    @property
    def nbytes(self) -> int:
        return int(self._index.memory_usage) if self._index is not None else 0

    def accepts(self, dim: int) -> bool:
        """Whether vectors of this width fit those already here."""
        return self._dim in (0, dim)

    def embedded(self, engine: int, event: BlocksEmbedded, now: float) -> None:
        """An engine sends embeddings of blocks; those that are no direction are passed over."""
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
        """Set the embedding of each block row (distinct) and link it to its neighbours.

        Args:
            rows: int32 ``[n]``.
            vectors: float32 ``[n, dim]``, finite and not zero; ``accepts(dim)`` holds.
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
        """Every embedding: ``rows`` int32 ``[n]`` and ``vectors`` float16 ``[n, dim]``."""
        if self._index is None:
            return {}
        blocks = self._tables.blocks
        embedded = blocks.flagged(np.s_[: blocks.size], BlockFlag.EMBEDDED)
        rows = np.flatnonzero(embedded).astype(np.int32)
        found = np.asarray(self._index.get(rows.astype(np.uint64)), dtype=np.float16)
        return {"rows": rows, "vectors": found.reshape(len(rows), self._dim)}

    def load_vectors(self, vectors: dict[str, npt.NDArray[Any]]) -> None:
        """Take over what ``vectors()`` gave; their edges are the store's own."""
        self._tables.blocks.unflag(np.s_[:], BlockFlag.EMBEDDED)
        if vectors and len(vectors["rows"]):
            rows, values = vectors["rows"], vectors["vectors"].astype(np.float32)
            self._ensure(values.shape[1]).add(rows.astype(np.uint64), values)
            self._tables.blocks.flag(rows, BlockFlag.EMBEDDED)

    def forget(self, rows: Rows) -> None:
        """These block rows are about to be reused."""
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
