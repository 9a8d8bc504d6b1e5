"""Explains what is wrong with a configuration, in one line that a person can act on."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, Final

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from ...graph.errors import ConfigError

_SECRET: Final = ".token"  # a key whose value is not shown
_LISTS: Final = frozenset({"tuple_type", "list_type", "frozen_set_type"})
_SHOWN: Final = 80  # characters shown of a wrong value; chosen

Layers = Mapping[str, Mapping[str, Any]]
"""Where values came from: the name of each layer, highest priority first, and its content."""


def explain_errors(error: ValidationError, model: type[BaseModel], layers: Layers) -> ConfigError:
    """The first wrong key of ``error``, as a ConfigError that says how many more there are."""
    details = error.errors(include_url=False)
    text = _explain(details[0], model, layers)
    more = f" (and {len(details) - 1} more)" if len(details) > 1 else ""
    return ConfigError(text + more)


def unknown_key(key: str, known: Iterable[str], origin: str) -> ConfigError:
    """``key``, which is none of its ``known`` siblings, with the closest of them."""
    section, _, name = key.rpartition(".")
    prefix = f"{section}." if section else ""
    close = difflib.get_close_matches(name, list(known), n=1)
    hint = f"did you mean {prefix}{close[0]}? " if close else ""
    return ConfigError(
        f"unknown key {_shown(key, quote=False)} ({origin}): "
        f"{hint}allowed: {', '.join(sorted(known))}"
    )


def _explain(detail: ErrorDetails, model: type[BaseModel], layers: Layers) -> str:
    path = detail["loc"]
    key = ".".join(map(str, path))
    origin = _origin(path, layers)
    if detail["type"] == "extra_forbidden":
        return str(unknown_key(key, _keys_at(model, path[:-1]), origin))
    wrong = 'allowed: a list: ["…", "…"]' if detail["type"] in _LISTS else _words(detail["msg"])
    value = "'…'" if key.endswith(_SECRET) else _shown(detail["input"])
    return f"{key} = {value} ({origin}): {wrong}"


def _words(message: str) -> str:
    told = message.removeprefix("Value error, ").replace("Input should be", "allowed: ")
    return " ".join(told.split())


def _shown(value: object, quote: bool = True) -> str:
    text = repr(value) if quote else repr(str(value))[1:-1]
    return text if len(text) <= _SHOWN else text[: _SHOWN - 1] + "…"


def _origin(path: tuple[int | str, ...], layers: Layers) -> str:
    """The layer that the value at ``path`` came from."""
    for name, content in layers.items():
        here: Any = content
        for step in path:
            try:
                here = here[step]
            except (KeyError, IndexError, TypeError):
                break
        else:
            return name
    return list(layers)[-1]


def _keys_at(model: type[BaseModel], path: tuple[int | str, ...]) -> list[str]:
    """The keys of the section at ``path``; the items of a list share one section."""
    section: Any = model
    for step in path:
        if isinstance(step, str):
            section = _section_of(section.model_fields[step].annotation)
    return list(section.model_fields)


def _section_of(annotation: Any) -> Any:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    return next(filter(None, map(_section_of, getattr(annotation, "__args__", ()))), None)
