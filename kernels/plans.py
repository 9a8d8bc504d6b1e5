"""How whole blocks go from one layout to another unchanged: the longest runs that both share."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple

from .errors import LayoutError
from .layout import KvLayout


class CopyPlan(NamedTuple):
    """How a block's bytes in one layout map to another's: runs that repeat over axes.

    Attributes:
        run: Elements of one contiguous run.
        axes: (extent, source stride, target stride) of what repeats within a block.
    """

    run: int
    axes: list[tuple[int, int, int]]


def copy_plan(source: KvLayout, target: KvLayout) -> CopyPlan:
    """The longest runs in which whole blocks go from ``source`` to ``target`` unchanged.

    Raises:
        LayoutError: The two hold different things, so that bytes cannot be copied as they are.
    """
    check_same_model(source, target)
    if source.dtype != target.dtype or _interior(source) != _interior(target):
        raise LayoutError(
            f"{source.name} ({source.dtype}) and {target.name} ({target.dtype}) differ inside a"
            " block: splice converts, spill and warm copy"
        )
    axes = [
        (extent, stride, other)
        for (extent, stride), (_, other) in zip(source.axes(), target.axes(), strict=True)
        if extent > 1
    ]
    axes.sort(key=lambda axis: axis[1])
    run = source.unit
    while axes and axes[0][1] == axes[0][2] == run:
        run *= axes.pop(0)[0]
    return CopyPlan(run, axes)


def check_same_model(source: KvLayout, target: KvLayout) -> None:
    """Raise ``LayoutError`` unless both hold the K and V of the same layers and heads."""
    for what in ("layers", "heads", "tokens"):
        if getattr(source, what) != getattr(target, what):
            raise LayoutError(
                f"{source.name} has {getattr(source, what)} {what}, "
                f"{target.name} {getattr(target, what)}; they must be equal"
            )
    if (source.key.dims, source.value.dims) != (target.key.dims, target.value.dims):
        raise LayoutError(f"{source.name} and {target.name} differ in head size")


def _interior(layout: KvLayout) -> tuple[Any, ...]:
    if layout.interleaved:
        return layout.key, layout.value
    return tuple(replace(plane, token_outer=0) for plane in (layout.key, layout.value))
