"""A renderer of turns that is a function in a Python file, as an application has it."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from ...graph.errors import ConfigError
from .stable_prefix import Render


def renderer(name: str, directory: Path) -> Render:
    """The function that ``FILE.py:FUNCTION`` names, its file seen from ``directory``.

    Raises:
        ConfigError: There is no such file or function, or the file cannot be run.
    """
    file, _, function = name.rpartition(":")
    path = directory / file
    spec = importlib.util.spec_from_file_location(path.stem, path) if file else None
    if spec is None or spec.loader is None:
        raise ConfigError(f"render = {name!r}: allowed: FILE.py:FUNCTION")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception as error:  # whatever an application's file does
        raise ConfigError(f"render = {name!r}: {path}: {type(error).__name__}: {error}") from None
    found: Render | None = getattr(module, function, None)
    if not callable(found):
        raise ConfigError(f"render = {name!r}: {path} has no function {function!r}")
    return found
