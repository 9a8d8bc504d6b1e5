"""Notices a changed configuration file, and takes it only if it is valid."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from .config import Config, load
from .edits import WeightEditor

logger = logging.getLogger(__name__)

LOOK_EVERY_S: Final = 1.0  # chosen
LIVE_SECTIONS: Final = ("score", "graph", "prefetch")
"""Sections that take effect while running; the others at the next start."""
LATER_GRAPH_KEYS: Final = ("max_sessions", "max_names")
"""Keys of [graph] that size tables which exist already."""


class ConfigWatch:
    """Rereads ``path`` when its modification time changes, or on request.

    An invalid file changes nothing: the values in force stay, and one line says why.
    """

    def __init__(
        self,
        config: Config,
        path: Path | None,
        overrides: Mapping[str, Any],
        clock: Callable[[], float],
    ) -> None:
        self.config = config
        self.counters: Counter[str] = Counter()
        self.last_error: str | None = None
        self._path = path
        self.editor = WeightEditor(path, overrides)
        self._overrides = dict(overrides)
        self._clock = clock
        self._seen = self._stamp()
        self._next_look = clock() + LOOK_EVERY_S
        self._asked = False

    @property
    def file(self) -> str | None:
        """The file that is watched; None without one."""
        return None if self._path is None else str(self._path)

    def ask(self) -> None:
        """Reread at the next ``poll``, whatever the file's time; safe in a signal handler."""
        self._asked = True

    def poll(self) -> Config | None:
        """The new configuration, once after each good change."""
        now = self._clock()
        if not self._asked and now < self._next_look:
            return None
        self._next_look = now + LOOK_EVERY_S
        stamp = self._stamp()
        if stamp == self._seen and not self._asked:
            return None
        self._seen, self._asked = stamp, False
        return self._reread()

    def _reread(self) -> Config | None:
        try:
            fresh = load(self._path, self._overrides)
        except Exception as error:  # whatever a file holds, the old one stays
            self.counters["refused"] += 1
            self.last_error = str(error) or type(error).__name__
            logger.warning("configuration not reloaded, the old one stays: %s", self.last_error)
            return None
        self.last_error = None
        if fresh == self.config:
            return None
        self.counters["reloaded"] += 1
        self._log_change(fresh)
        self.config = fresh
        return fresh

    def _log_change(self, fresh: Config) -> None:
        changed = [s for s in Config.model_fields if getattr(fresh, s) != getattr(self.config, s)]
        later = [f"[{section}]" for section in changed if section not in LIVE_SECTIONS]
        later += [
            f"graph.{key}"
            for key in LATER_GRAPH_KEYS
            if getattr(fresh.graph, key) != getattr(self.config.graph, key)
        ]
        logger.info("configuration reloaded: [%s] changed", "], [".join(changed))
        if later:
            logger.warning("%s takes effect at the next start", ", ".join(later))

    def _stamp(self) -> tuple[int, int, int] | None:
        try:
            found = self._path.stat() if self._path else None
        except OSError:
            return None
        return (found.st_mtime_ns, found.st_size, found.st_ino) if found else None
