"""Changes of weights that a person makes over the page: written to the file, and taken back.

The file is what is changed; ``ConfigWatch`` notices, as it would of a change by hand. So what the
page did is in the file, survives a restart, and can be read there.
"""

from __future__ import annotations

import logging
import os
import re
import tempfile
import threading
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, Final

from ...graph.errors import ConfigError
from ...graph.types import LAYER_NAMES
from .config import load
from .config_errors import unknown_key
from .sections import EdgeTypesConfig, ScoreConfig

logger = logging.getLogger(__name__)

_HEADER: Final = re.compile(r"\s*\[")
_KEPT: Final = 32  # changes that can be taken back

Change = Mapping[str, Mapping[str, Any]]
"""By section, ``score`` or ``score.edge_types``: values by key."""


class WeightEditor:
    """Writes the [score] sections of one configuration file; from any thread.

    Args:
        path: The file; None: this sidecar has none, and nothing can be changed.
        overrides: The command line's, which win over the file.
    """

    def __init__(self, path: Path | None, overrides: Mapping[str, Any]) -> None:
        self._path = path
        self._overrides = dict(overrides)
        self._before: list[str] = []
        self._lock = threading.Lock()

    @property
    def undoable(self) -> int:
        """How many changes can be taken back."""
        return len(self._before)

    def apply(self, change: Change, who: str) -> ScoreConfig:
        """Write a change; what [score] is by now.

        Args:
            who: The name of the token that allowed it, for the log.

        Raises:
            ConfigError: There is no file; a value is not allowed; the environment or the command
                line says otherwise and would win; the file cannot be written.
        """
        with self._lock:
            path, text, edited = self._edited(change)
            score = self._checked(path, edited, change)
            _replace(path, edited)
            self._before = [*self._before, text][-_KEPT:]
        logger.info("[score] changed over the page, by the %s token: %s", who, _worded(change))
        return score

    def tried(self, change: Change) -> ScoreConfig:
        """What [score] would be; nothing is written. Raises ConfigError as ``apply`` does."""
        with self._lock:
            path, _, edited = self._edited(change)
            return self._checked(path, edited, change)

    def undo(self, who: str) -> ScoreConfig:
        """Take the last change back; what [score] is by now.

        Raises:
            ConfigError: There is none, or the file cannot be written.
        """
        with self._lock:
            path = self._file()
            if not self._before:
                raise ConfigError("no change was made over the page since this sidecar started")
            score = self._checked(path, self._before[-1], {})
            _replace(path, self._before.pop())
        logger.info("the last change of [score] was taken back over the page, by the %s token", who)
        return score

    def _edited(self, change: Change) -> tuple[Path, str, str]:
        """The file, its text, and what that would be."""
        path = self._file()
        _check_names(change)
        text = edited = path.read_text() if path.exists() else ""
        for section, values in change.items():
            edited = _with(edited, section, values)
        return path, text, edited

    def _file(self) -> Path:
        if self._path is None:
            raise ConfigError(
                "this sidecar was started without a configuration file; start it with --config"
            )
        return self._path

    def _checked(self, path: Path, text: str, change: Change) -> ScoreConfig:
        """[score] as the sidecar will read it from this text; ConfigError where it will not do."""
        with tempfile.TemporaryDirectory() as folder:
            tried = Path(folder) / path.name
            tried.write_text(text)
            try:
                score = load(tried, self._overrides).score
            except ConfigError as error:
                raise ConfigError(str(error).replace(str(tried), str(path))) from None
        for section, values in change.items():
            found: Any = score.edge_types if section == "score.edge_types" else score
            for key, value in values.items():
                now: Any = getattr(found, key, None)
                same = set(now) == set(value) if isinstance(value, list) else now == value
                if not same:
                    raise ConfigError(
                        f"{section}.{key}: the environment or the command line sets {now!r}, "
                        "which wins over the file"
                    )
        return score


def _check_names(change: Change) -> None:
    """What becomes text of the file is ours: keys and layers that exist, and numbers."""
    known = {"score": ScoreConfig.model_fields, "score.edge_types": EdgeTypesConfig.model_fields}
    for section, values in change.items():
        for key, value in values.items():
            if key not in known[section]:
                raise unknown_key(f"{section}.{key}", known[section], "the page")
            if key == "protected_layers":
                for name in value:
                    if name not in LAYER_NAMES:
                        raise unknown_key(name, LAYER_NAMES, "the page")


def _with(text: str, section: str, values: Mapping[str, Any]) -> str:
    """A file's text with these keys of a section set; all else stays as it was, comments too."""
    lines = text.splitlines()
    first, end = _span(lines, section)
    if first is None:
        lines += ["", f"[{section}]"] if lines else [f"[{section}]"]
        first = end = len(lines)
    for key, value in values.items():
        line = f"{key} = {_toml(value)}"
        at = next((n for n in range(first, end) if _sets(lines[n], key)), None)
        if at is None:
            lines.insert(end, line)
            end += 1
        else:
            lines[at] = line
    return "\n".join(lines) + "\n"


def _span(lines: list[str], section: str) -> tuple[int | None, int]:
    """The lines of a section, behind its header, without empty ones at its end."""
    header = re.compile(rf"\s*\[\s*{re.escape(section)}\s*\]\s*(#.*)?$")
    at = next((n for n, line in enumerate(lines) if header.match(line)), None)
    if at is None:
        return None, len(lines)
    end = next((n for n in range(at + 1, len(lines)) if _HEADER.match(lines[n])), len(lines))
    while end > at + 1 and not lines[end - 1].strip():
        end -= 1
    return at + 1, end


def _sets(line: str, key: str) -> bool:
    return re.match(rf"\s*{re.escape(key)}\s*=", line) is not None


def _toml(value: Any) -> str:
    if isinstance(value, list):
        return "[" + ", ".join(f'"{each}"' for each in value) + "]"
    return repr(float(value))


def _replace(path: Path, text: str) -> None:
    """Write a file whole, or not at all."""
    try:
        tomllib.loads(text)
        fresh = path.with_name(f".{path.name}.new")
        fresh.write_text(text)
        if path.exists():
            os.chmod(fresh, path.stat().st_mode & 0o777)
        fresh.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: cannot be written: {error.strerror}") from None


def _worded(change: Change) -> str:
    return ", ".join(
        f"{section}.{key} = {value}"
        for section, values in change.items()
        for key, value in values.items()
    )
