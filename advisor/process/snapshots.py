"""Keeps the graph on disk: restores it at the start, saves it periodically and at the end."""

from __future__ import annotations

import logging
import os
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ...graph.errors import SnapshotError
from ...graph.kvcache_graph import KVCacheGraph
from ...graph.snapshot import load, save

logger = logging.getLogger(__name__)


class SnapshotKeeper:
    """Saves ``graph`` to ``path`` every ``interval_s`` seconds, on its own thread. A full or
    read-only disk is logged once until it works again; the sidecar continues from memory.
    """

    def __init__(
        self, graph: KVCacheGraph, path: Path | None, interval_s: float, clock: Callable[[], float]
    ) -> None:
        self._graph = graph
        self._path = path
        self._interval_s = interval_s
        self._clock = clock
        self._saved_version: int | None = None
        self._saved_at: float | None = None
        self._error: str | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._run, name="kvgraph-snapshot", daemon=True)
        self.counters: Counter[str] = Counter()

    def restore(self) -> None:
        """Fill the empty graph from the last snapshot; a bad one is renamed to ``NAME.refused``."""
        if self._path is None or not os.path.lexists(self._path):
            return
        try:
            load(self._graph, self._path)
        except SnapshotError as error:
            self.counters["refused"] += 1
            kept = _set_aside(self._path)
            logger.warning("starting with an empty graph: %s%s", error, kept)
            return
        self.counters["restored"] += 1
        self._saved_version = self._graph.changes.total
        logger.info("graph restored from %s", self._path)

    def save(self) -> None:
        """Save now, unless nothing changed since the last save."""
        version = self._graph.changes.total
        if self._path is None or version == self._saved_version:
            return
        try:
            self.counters["bytes"] = save(self._graph, self._path)
        except Exception as error:  # whatever it is, the next round may go better
            self._note_failure(str(error) or type(error).__name__)
            return
        if self._error is not None:
            logger.info("snapshots are written again to %s", self._path)
        self._error, self._saved_version, self._saved_at = None, version, self._clock()
        self.counters["saved"] += 1

    def status(self) -> dict[str, Any]:
        saved_at = self._saved_at
        return {
            "path": None if self._path is None else str(self._path),
            "age_s": None if saved_at is None else round(self._clock() - saved_at, 3),
            "error": self._error,
        }

    def start(self) -> None:
        if self._path is not None:
            self._thread.start()

    def stop(self) -> None:
        self._stopping.set()
        if self._thread.is_alive():
            self._thread.join()
        self.save()

    def _run(self) -> None:
        while not self._stopping.wait(self._interval_s):
            self.save()

    def _note_failure(self, error: str) -> None:
        self.counters["failed"] += 1
        if self._error is None:
            logger.warning("%s; serving from memory, and trying again", error)
        self._error = error


def _set_aside(path: Path) -> str:
    """Rename a refused snapshot, replacing an older one; returns a note for the log."""
    aside = path.with_name(f"{path.name}.refused")
    try:
        if not path.is_file():
            return ""
        path.replace(aside)
    except OSError as error:
        return f"; it stays where it is ({error.strerror or error})"
    return f"; it is kept as {aside.name}"
