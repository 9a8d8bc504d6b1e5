"""The operations as others call them: arguments are checked, then the fastest back end does it.

``AITHER_KVCACHE_KERNELS=reference`` keeps to plain torch; ``auto``, the default, takes CUDA kernels
for memory on a GPU, the compiled CPU path for memory on the host, and torch where neither works.
"""

from __future__ import annotations

import functools
import os
from types import ModuleType
from typing import Any, Final

from .backends import native, reference
from .errors import BuildError, KernelError, SlotError
from .layout.layout import PagedKv
from .maths.rope import Rope

SWITCH: Final = "AITHER_KVCACHE_KERNELS"
CHOICES: Final = ("auto", "reference")


def prepare(cache: PagedKv, arena: PagedKv) -> None:
    """Compile and measure now what the first copies would else wait for; takes seconds on a GPU.

    Raises:
        BuildError: Memory is on a GPU and its kernels cannot be compiled.
    """
    chosen = backend(cache, arena)
    if cache.memory.is_cuda and chosen is not reference:
        chosen.prepare(cache, arena)


def spill(cache: PagedKv, blocks: Any, arena: PagedKv, records: Any) -> None:
    """Copy blocks of a cache to records of the arena; see ``reference.spill``.

    Raises:
        SlotError: A number is out of range, or the two lists differ in length.
        LayoutError: The layouts differ inside a block.
    """
    _check(cache, blocks, cache.layout.blocks, "block")
    _check(arena, records, arena.layout.blocks, "record")
    _check_pairs(blocks, records)
    backend(cache, arena).spill(cache, blocks, arena, records)


def warm(arena: PagedKv, records: Any, cache: PagedKv, blocks: Any) -> None:
    """Copy records of the arena back to blocks of a cache; raises like ``spill``."""
    _check(cache, blocks, cache.layout.blocks, "block")
    _check(arena, records, arena.layout.blocks, "record")
    _check_pairs(blocks, records)
    backend(arena, cache).warm(arena, records, cache, blocks)


def splice(
    source: PagedKv, source_slots: Any, target: PagedKv, target_slots: Any, delta: Any, rope: Rope
) -> None:
    """Copy tokens to other positions, K rotated by Δ; see ``reference.splice``.

    Raises:
        SlotError: A slot is out of range (negative ones are skipped), or lengths differ.
        LayoutError: The layouts hold different models.
    """
    _check(source, source_slots, source.layout.slots, "slot", lowest=None)
    _check(target, target_slots, target.layout.slots, "slot", lowest=None)
    _check_pairs(source_slots, target_slots, delta)
    backend(source, target).splice(source, source_slots, target, target_slots, delta, rope)


def rotate_in_place(cache: PagedKv, slots: Any, delta: Any, rope: Rope) -> None:
    """Rotate keys where they stand; raises like ``splice``."""
    _check(cache, slots, cache.layout.slots, "slot", lowest=None)
    _check_pairs(slots, delta)
    backend(cache).rotate_in_place(cache, slots, delta, rope)


def backend(*memories: PagedKv) -> ModuleType:
    """The module whose operations move these memories' bytes.

    Raises:
        BuildError: Memory is on a GPU and its kernels cannot be compiled.
        KernelError: The switch has a value that is not known.
    """
    chosen = os.environ.get(SWITCH, "auto")
    if chosen not in CHOICES:
        raise KernelError(f"{SWITCH}={chosen!r} is not known; allowed: {', '.join(CHOICES)}")
    if chosen == "reference":
        return reference
    if any(kv.memory.is_cuda for kv in memories):
        from .backends import device

        return device
    return reference if native_problem() else native


@functools.cache
def native_problem() -> str | None:
    """Why host memory is moved by torch and not by the compiled path; None if it is compiled."""
    try:
        native.library()
    except BuildError as error:
        return str(error)
    return None


def _check(kv: PagedKv, numbers: Any, limit: int, what: str, lowest: int | None = 0) -> None:
    """Numbers on a GPU are trusted: looking at them would wait for the device."""
    if numbers.is_cuda or not numbers.numel():
        return
    smallest, largest = (int(value) for value in numbers.aminmax())
    if largest >= limit or (lowest is not None and smallest < lowest):
        raise SlotError(
            f"{what} {largest if largest >= limit else smallest} of {kv.layout.name}; "
            f"allowed: 0 to {limit - 1}"
        )


def _check_pairs(*lists: Any) -> None:
    lengths = {int(numbers.numel()) for numbers in lists}
    if len(lengths) > 1:
        raise SlotError(f"lists that belong together have lengths {sorted(lengths)}")
