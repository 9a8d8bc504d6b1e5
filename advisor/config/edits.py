"""Changes of weights that a person makes over the page: written to the file, and taken back.

The file is what is changed; ``ConfigWatch`` notices, as it would of a change by hand. So what the
page did is in the file, survives a restart, and can be read there.
"""

from __future__ import annotations

import logging
import tempfile
import threading
import tomllib
from collections.abc import Mapping
from operator import attrgetter
from pathlib import Path
from typing import Any, Final

from ...graph.errors import ConfigError
from ...graph.types import LAYER_NAMES
from ..policies.registry import POLICIES
from .config import Config, load
from .config_errors import unknown_key
from .sections import EdgeTypesConfig, ScoreConfig
from .weight_text import with_values
from .whole_file import read_whole, replace_whole

logger = logging.getLogger(__name__)

_NO_FILE: Final = Path("the page")  # stands for a file in errors, where there is none
NO_FILE: Final = (
    "this sidecar was started without a configuration file; start it with --config FILE, or the "
    "engine that starts it with KVGRAPH_CONFIG=FILE"
)
_KEPT: Final = 32  # changes that can be taken back

Change = Mapping[str, Mapping[str, Any]]
"""By section, ``score``, ``score.edge_types`` or ``policy``: values by key."""


class WeightEditor:
    """Writes the [score] and [policy] sections of one configuration file; from any thread.

    Args:
        path: The file; None: this sidecar has none, and nothing can be changed.
        overrides: The command line's, which win over the file.
    """

    def __init__(self, path: Path | None, overrides: Mapping[str, Any]) -> None:
        self._path = path
        self._overrides = dict(overrides)
        self._changes: list[tuple[str, str]] = []  # the file's text before and after
        self._lock = threading.Lock()

    @property
    def undoable(self) -> int:
        """How many changes can be taken back."""
        return len(self._changes)

    def apply(self, change: Change, who: str) -> Config:
        """Write a change; what the file says by now.

        Args:
            who: The name of the token that allowed it, for the log.

        Raises:
            ConfigError: There is no file; a value is not allowed; the environment or the command
                line says otherwise and would win; the file cannot be read or written.
        """
        with self._lock:
            path, text, edited = self._edited(change, self._file())
            config = self._checked(path, edited, change)
            replace_whole(path, edited)
            self._changes = [*self._changes, (text, edited)][-_KEPT:]
        logger.info("changed over the page, by the %s token: %s", who, change_in_words(change))
        return config

    def tried(self, change: Change) -> Config:
        """What the file would say, or one that there is not; nothing is written. Raises ConfigError
        for a value that is not allowed, or that does not win."""
        with self._lock:
            path, _, edited = self._edited(change, self._path or _NO_FILE)
            return self._checked(path, edited, change)

    def undo(self, who: str) -> Config:
        """Take the last change back; what the file says by now.

        Raises:
            ConfigError: There is none; the file was changed by hand since; it cannot be read or
                written.
        """
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
        """The file, its text, and what that would be."""
        _check_names(change)
        text = edited = "" if path is _NO_FILE else read_whole(path)
        if (error := _toml_error(text)) is not None:
            raise ConfigError(f"configuration file {str(path)!r} is not TOML: {error}")
        for section, values in change.items():
            edited = with_values(edited, section, values)
            if _toml_error(edited) is not None:
                raise ConfigError(
                    f"{path} sets [{section}] in a form that the page cannot change (an inline "
                    f"table, dotted or quoted names); write it as a table under [{section}]"
                )
        return path, text, edited

    def _file(self) -> Path:
        if self._path is None:
            raise ConfigError(NO_FILE)
        return self._path

    def _checked(self, path: Path, text: str, change: Change) -> Config:
        """What the sidecar will read from this text; ConfigError where it will not do."""
        config = self._loaded(path, text)
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

    def _loaded(self, path: Path, text: str) -> Config:
        with tempfile.TemporaryDirectory() as folder:
            tried = Path(folder) / path.name
            tried.write_bytes(text.encode("utf-8"))
            try:
                return load(tried, self._overrides)
            except ConfigError as error:
                raise ConfigError(str(error).replace(str(tried), str(path))) from None


def _toml_error(text: str) -> str | None:
    """Why a text is not TOML; None if it is."""
    try:
        tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        return str(error)
    return None


def _check_names(change: Change) -> None:
    """What becomes text of the file is ours: keys, layers and policies that exist, and numbers."""
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
    """A change as the log tells it."""
    return ", ".join(
        f"{section}.{key} = {value}"
        for section, values in change.items()
        for key, value in values.items()
    )
