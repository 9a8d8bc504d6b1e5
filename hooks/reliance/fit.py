"""A name of vLLM's that the hooks need, what a vLLM has under it, and whether the two fit."""

from __future__ import annotations

from collections.abc import Callable
from enum import Enum
from typing import Final, NamedTuple

Shape = tuple[str, ...] | None
"""What stands under a name: None: nothing; ``VALUE``: a value; else a callable's parameters.

A parameter with a default ends in ``=``; ``*args`` and ``**kwargs`` are spelled so.
"""
VALUE: Final[Shape] = (".",)


class Part(Enum):
    """What cannot work without a name."""

    ALL = "everything"
    TIERS = "tiers"
    ADMISSION = "admission"
    SAMPLING = "sampling decode steps"
    ENDS = "reading why answers end"
    WAKING = "waking an idle engine for prefetches"


class Use(Enum):
    """What the hooks do with a name."""

    READ = "read"
    NAMED = "named"  # only has to be there
    CALLED = "called"  # with these parameters, or they are read from calls that vLLM makes
    OVERRIDDEN = "overridden"  # vLLM calls ours instead, with these parameters


class Need(NamedTuple):
    """One row of the table.

    Attributes:
        module: The module to import it from.
        path: Its name there, with those of the classes around it.
        parameters: The parameters that we know; of a callable, at least all that are required.
    """

    module: str
    path: str
    use: Use
    parameters: tuple[str, ...] = ()
    part: Part = Part.ALL

    @property
    def name(self) -> str:
        """Both together, as in ``module.Class.method``."""
        return f"{self.module}.{self.path}"


def misfits(needs: tuple[Need, ...], shape_of: Callable[[Need], Shape]) -> list[str]:
    """One sentence per need that a vLLM does not meet."""
    return [problem for need in needs if (problem := misfit(need, shape_of(need)))]


def misfit(need: Need, shape: Shape) -> str | None:
    """Why a vLLM with ``shape`` under this name does not fit; None if it does."""
    if shape is None:
        return f"{need.name} is missing"
    if need.use is Use.NAMED:
        return None
    if (shape == VALUE) is not (need.use is Use.READ):
        return f"{need.name} is {'a' if need.use is Use.READ else 'no'} method"
    return None if need.use is Use.READ else _misfit_of_call(need, shape)


def _misfit_of_call(need: Need, shape: tuple[str, ...]) -> str | None:
    known, names = need.parameters, [each.rstrip("=").lstrip("*") for each in shape]
    if lost := [name for name in known if name not in names]:
        return f"{need.name} takes no {', '.join(lost)}"
    if [name for name in names if name in known] != list(known):
        return f"{need.name} takes {', '.join(known)} in another order"
    new = [each for each in shape if each.rstrip("=") not in known and not each.startswith("*")]
    if need.use is Use.CALLED:
        new = [each for each in new if not each.endswith("=")]
    return f"{need.name} wants {', '.join(each.rstrip('=') for each in new)}" if new else None
