"""Which vLLM versions fit, and which of the names that hooks rely on the installed one lacks."""

from __future__ import annotations

import dis
import importlib
import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from .relied_on import RELIED_ON, VALUE, Need, Part, Shape, misfits, unknown_places

_MISSING: Final = object()
_IMPLIED: Final = ("self", "cls")


def live_misfits(part: Part = Part.ALL) -> list[str]:
    """Return what the installed vLLM lacks for ``part``, or requires beyond what we know."""
    return misfits(tuple(need for need in RELIED_ON if need.part is part), live_shape)


def live_unknown_places() -> list[str]:
    """Return unreviewed places in the installed vLLM; see ``relied_on.KNOWN``."""
    return unknown_places(Path(str(importlib.import_module("vllm").__file__)).parent)


def live_shape(need: Need) -> Shape:
    """Return what the installed vLLM has under a name."""
    first, *rest = need.path.split(".")
    try:  # asked as an import would: some modules make their names when these are wanted
        found: Any = getattr(importlib.import_module(need.module), first)
    except (ImportError, AttributeError):
        return None
    for name in rest:
        found, owner = inspect.getattr_static(found, name, _MISSING), found
        if found is _MISSING:
            return VALUE if name in _of_instances(owner) else None
    return _shape(found)


def _shape(found: Any) -> Shape:
    if isinstance(found, classmethod | staticmethod):
        found = found.__func__
    if not inspect.isfunction(found):
        return VALUE
    parameters = inspect.signature(found).parameters.values()
    return tuple(_written(each) for each in parameters if each.name not in _IMPLIED)


def _written(parameter: inspect.Parameter) -> str:
    if parameter.kind is parameter.VAR_POSITIONAL:
        return f"*{parameter.name}"
    if parameter.kind is parameter.VAR_KEYWORD:
        return f"**{parameter.name}"
    return parameter.name if parameter.default is parameter.empty else f"{parameter.name}="


def _of_instances(owner: type) -> Iterator[str]:
    """Attributes that a class and its bases declare, or that their constructors store."""
    for each in owner.__mro__:
        yield from vars(each).get("__annotations__", ())
        init = inspect.unwrap(vars(each).get("__init__", object.__init__))
        if inspect.isfunction(init):
            stores = (each for each in dis.get_instructions(init) if each.opname == "STORE_ATTR")
            yield from (each.argval for each in stores)


TESTED: Final = "0.32"  # the tests run with it, and real engines of its CPU build
COMPARED: Final = ("0.31", "0.33")  # names and parameters, in the sources of the release
READ: Final = ("0.31.0", "0.32.0", "0.33.0")  # releases for which ``relied_on.KNOWN`` is complete
_FITTING: Final = ", ".join(sorted((TESTED, *COMPARED)))
WHAT_FITS: Final = f"vLLM {_FITTING} fit; tests run with {TESTED}.x"


def is_tested(version: str) -> bool:
    return _minor(version) == TESTED


def is_known(version: str) -> bool:
    """Whether a release of this minor version was tested, or compared with one that was."""
    return is_tested(version) or _minor(version) in COMPARED


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
