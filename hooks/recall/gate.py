"""Stores models' calibrations: how far their keys may move. There is one file per model, in the
user's cache directory. Nothing is spliced without a calibration that passed.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Final

import msgspec

from ...graph.errors import ConfigError
from .cover import SpliceLimits

DIRECTORY_VARIABLE: Final = "AITHER_KVCACHE_CALIBRATIONS"
_VERSION: Final = 2  # version of the file format
_DIGITS: Final = 24  # 96 bits in a file name; chosen


@dataclass(frozen=True, slots=True)
class Calibration:
    model: str  # the model's name, for display
    identity: str  # digest of all that the result depends on; see ``identity_of``
    passed: bool  # whether splicing is allowed at all
    reason: str  # why not, or how far, in words
    limits: SpliceLimits = field(default_factory=SpliceLimits)  # what is allowed if it passed
    # The measurements, as ``kvgraph calibrate`` prints them.
    cells: tuple[Mapping[str, Any], ...] = ()


def identity_of(weights: object, rotation: object) -> str:
    """Return a digest of a model's weights and of the rotation of its keys."""
    return hashlib.sha256(repr((weights, rotation)).encode()).hexdigest()


def calibration_file(identity: str, environment: Mapping[str, str] = os.environ) -> Path:
    named = environment.get(DIRECTORY_VARIABLE, "").strip()
    cache = environment.get("XDG_CACHE_HOME", "").strip()
    below = Path(cache) if cache else Path.home() / ".cache"
    directory = Path(named) if named else below / "kvgraph" / "calibrations"
    return directory / f"{identity[:_DIGITS]}.json"


def save(calibration: Calibration, path: Path) -> None:
    """Write a calibration atomically: the file appears complete or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile("w", dir=path.parent, suffix=".new", delete=False) as file:
        json.dump({"version": _VERSION, **asdict(calibration)}, file, indent=1)
    Path(file.name).replace(path)


def load(identity: str, path: Path) -> Calibration:
    """Read the calibration of the model with this identity; raises ConfigError."""
    calibration = _read(path)
    if calibration.identity != identity:
        raise ConfigError(f"the calibration in {path} is not of this model: calibrate it again")
    return calibration


def kept_calibrations(directory: Path) -> list[Calibration]:
    """Return all readable calibrations of a directory, sorted by model name."""
    found: list[Calibration] = []
    for path in directory.glob("*.json"):
        with contextlib.suppress(ConfigError):
            found.append(_read(path))
    return sorted(found, key=lambda each: each.model)


def _read(path: Path) -> Calibration:
    try:
        if path.exists() and not path.is_file():  # the engine would wait for a pipe's other end
            raise OSError("it is no regular file")
        read = msgspec.json.decode(path.read_bytes())
        calibration = _typed(read) if read.pop("version") == _VERSION else None
    except FileNotFoundError:
        raise ConfigError(
            "this model is not calibrated, by this user and for this --max-model-len: run "
            "`kvgraph calibrate MODEL`"
        ) from None
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise ConfigError(
            f"the calibration in {path} cannot be read ({error}): calibrate again"
        ) from None
    if calibration is None:
        raise ConfigError(f"the calibration in {path} is of another release: calibrate again")
    return calibration


def _typed(read: dict[str, Any]) -> Calibration:
    for said, kind in ((read, Calibration), (read["limits"], SpliceLimits)):
        if missing := {each.name for each in fields(kind)} - said.keys():
            raise ValueError(f"it lacks {', '.join(sorted(missing))}")
    return msgspec.convert(read, Calibration)
