"""Edits weights in the configuration file on behalf of the page; ``ConfigWatch`` reloads it as
after an edit by hand. So every change is visible in the file and survives a restart.
"""

from __future__ import annotations

import contextlib
import logging
import os
import stat
import tempfile
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

import tomlkit
from tomlkit.items import InlineTable

from ...graph.errors import ConfigError
from ...graph.types import LAYER_NAMES
from ..policies.registry import POLICIES
from .config import Config, check_regular, load, read_toml, unknown_key
from .sections import EdgeTypesConfig, ScoreConfig


def with_values(text: str, section: str, values: Mapping[str, Any]) -> str:
    """Set these keys of a section in a TOML text, nothing else. Raises ValueError or TypeError."""
    text = text.removeprefix("\ufeff")  # with which TOML would be none
    windows = text.count("\r\n") == text.count("\n") > 0
    document = tomlkit.parse(text.replace("\r\n", "\n") if windows else text)
    table: Any = document
    first, *_ = section.split(".")
    # A table between dotted keys (``score.age = …``) would take in those behind it.
    dotted = any(key.is_dotted() and key.key == first for key, _ in document.body if key)
    for name in section.split("."):
        if name not in table:
            if table is document and text:
                table.add(tomlkit.nl())
            inline = dotted or isinstance(table, InlineTable)
            table[name] = tomlkit.inline_table() if inline else tomlkit.table()
        table = table[name]
    for key, value in values.items():
        table[key] = value if isinstance(value, list | str) else float(value)
    edited = tomlkit.dumps(document)
    return edited.replace("\n", "\r\n") if windows else edited


def read_whole(path: Path) -> str:
    """Return a file's text with its line ends, "" without a file. Raises ConfigError."""
    try:
        return path.read_bytes().decode("utf-8")
    except FileNotFoundError:
        return ""
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: is not UTF-8, as TOML must be: {error}") from None


def replace_whole(path: Path, text: str) -> None:
    """Replace a file's content atomically; raises ConfigError.

    A symbolic link stays, and its target is written. The mode stays, and so do owner and group if
    this user may set them; no other user can read the text while it is written.
    """
    target = Path(os.path.realpath(path))
    try:
        # A fresh name, which no link can have been planted at.
        number, fresh = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
        try:
            with open(number, "wb") as file:
                file.write(text.encode("utf-8"))
                file.flush()
                _copy_rights(target, number)
                os.fsync(number)
            os.replace(fresh, target)
        except BaseException:
            os.unlink(fresh)
            raise
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


def _copy_rights(target: Path, number: int) -> None:
    """Give an open file the group, owner and mode of the file that it will replace."""
    try:
        found = target.stat()
    except FileNotFoundError:
        return
    mode = stat.S_IMODE(found.st_mode) & 0o777
    try:
        os.fchown(number, -1, found.st_gid)
    except PermissionError:
        # Another group than it was meant for may do what everybody may.
        mode = mode & 0o707 | (mode & 0o007) << 3
    with contextlib.suppress(PermissionError):
        os.fchown(number, found.st_uid, -1)
    os.fchmod(number, mode)


logger = logging.getLogger(__name__)

_NO_FILE: Final = Path("the page")  # stands for a file in errors if there is none
NO_FILE: Final = (
    "this sidecar was started without a configuration file; start it with --config FILE, or the "
    "engine that starts it with KVGRAPH_CONFIG=FILE"
)
_KEPT: Final = 32  # changes that can be undone

Change = Mapping[str, Mapping[str, Any]]  # score, score.edge_types or policy → key → value


class WeightEditor:
    """Edits the [score] and [policy] sections of one configuration file; callable from any thread.

    Every method raises ConfigError if there is no file, if it cannot be read or written, or if a
    value is not allowed or is overridden by the environment or the command line.
    """

    def __init__(self, path: Path | None, overrides: Mapping[str, Any]) -> None:
        self._path = path
        self._overrides = dict(overrides)
        self._changes: list[tuple[str, str]] = []  # the file's text before and after
        self._lock = threading.Lock()

    @property
    def undoable(self) -> int:
        return len(self._changes)

    def apply(self, change: Change, who: str) -> Config:
        """Write a change; returns the new configuration. ``who``: the token's name, for the log."""
        with self._lock:
            path, text, edited = self._edited(change, self._file())
            config = self._checked(path, edited, change)
            replace_whole(path, edited)
            self._changes = [*self._changes, (text, edited)][-_KEPT:]
        logger.info("changed over the page, by the %s token: %s", who, change_in_words(change))
        return config

    def tried(self, change: Change) -> Config:
        """Return the configuration that would result from a change; nothing is written."""
        with self._lock:
            path, _, edited = self._edited(change, self._path or _NO_FILE)
            return self._checked(path, edited, change)

    def undo(self, who: str) -> Config:
        """Undo the last change, unless the file was edited since; returns the configuration."""
        with self._lock:
            path = self._file()
            if not self._changes:
                raise ConfigError("no change was made over the page since this sidecar started")
            before, after = self._changes[-1]
            if read_whole(path) != after:
                raise ConfigError(
                    f"{path} was changed by hand since the last change over the page, which is "
                    "therefore not taken back; set the values anew, here or in the file"
                )
            config = self._checked(path, before, {})
            replace_whole(path, before)
            self._changes.pop()
        logger.info("the last change was taken back over the page, by the %s token", who)
        return config

    def _edited(self, change: Change, path: Path) -> tuple[Path, str, str]:
        _check_names(change)
        text = edited = "" if path is _NO_FILE else read_whole(path)
        read_toml(path, text)
        for section, values in change.items():
            try:
                edited = with_values(edited, section, values)
            except (TypeError, ValueError):
                raise ConfigError(
                    f"{path}: {section} is no table; write it as [{section}]"
                ) from None
        return path, text, edited

    def _file(self) -> Path:
        if self._path is None:
            raise ConfigError(NO_FILE)
        return self._path

    def _checked(self, path: Path, text: str, change: Change) -> Config:
        config = load(path, self._overrides, text)
        for section, values in change.items():
            found: Any = attrgetter(section)(config)
            for key, value in values.items():
                now: Any = getattr(found, key, None)
                same = set(now) == set(value) if isinstance(value, list) else now == value
                if not same:
                    raise ConfigError(
                        f"{section}.{key}: the environment or the command line sets {now!r}, "
                        "which wins over the file"
                    )
        return config


def _check_names(change: Change) -> None:
    """Allow only known keys, layers and policies, since they become text of the file."""
    known = {
        "score": ScoreConfig.model_fields,
        "score.edge_types": EdgeTypesConfig.model_fields,
        "policy": ("name",),
    }
    for section, values in change.items():
        for key, value in values.items():
            if key not in known[section]:
                raise unknown_key(f"{section}.{key}", known[section], "the page")
            if section == "policy" and value not in POLICIES:
                raise unknown_key(value, POLICIES, "the page")
            if key == "protected_layers":
                for name in value:
                    if name not in LAYER_NAMES:
                        raise unknown_key(name, LAYER_NAMES, "the page")


def change_in_words(change: Change) -> str:
    return ", ".join(
        f"{section}.{key} = {value}"
        for section, values in change.items()
        for key, value in values.items()
    )


POLL_EVERY_S: Final = 1.0  # chosen
LIVE_SECTIONS: Final = ("score", "graph", "prefetch")  # others need a restart
LATER_GRAPH_KEYS: Final = ("max_sessions", "max_names")  # these do, since they size existing tables


class ConfigWatch:
    """Reloads ``path`` when its modification time changes, or on request. An invalid file changes
    nothing: the present values stay, and one log line gives the reason.
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
        self._next_poll = clock() + POLL_EVERY_S
        self._asked = False

    @property
    def file(self) -> str | None:
        return None if self._path is None else str(self._path)

    def ask(self) -> None:
        """Reload at the next ``poll``, even if the file is unchanged; safe in a signal handler."""
        self._asked = True

    def poll(self) -> Config | None:
        """Return the new configuration, once after each valid change; None otherwise."""
        now = self._clock()
        if not self._asked and now < self._next_poll:
            return None
        self._next_poll = now + POLL_EVERY_S
        stamp = self._stamp()
        if stamp == self._seen and not self._asked:
            return None
        self._seen, self._asked = stamp, False
        return self._reread()

    def _reread(self) -> Config | None:
        try:
            if self._path is not None:
                check_regular(self._path)
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
