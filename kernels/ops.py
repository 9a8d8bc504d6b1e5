"""The operations as others call them: arguments are checked, then the fastest back end does it.

``AITHER_KVCACHE_KERNELS=reference`` keeps to plain torch; ``auto``, the default, takes CUDA kernels
for memory on a GPU, the compiled CPU path for memory on the host, and torch where neither works.
The switch is read once.
"""

from __future__ import annotations

from .backends.base import Backend
from .backends.choice import fastest
from .errors import SlotError
from .layout.layout import PagedKv
from .maths.rope import Rope
from .tensors import Tensor


def prepare(cache: PagedKv, arena: PagedKv) -> None:
    """Compile and measure now what the first copies would else wait for; takes seconds on a GPU.

    Raises:
        BuildError: Memory is on a GPU and its kernels cannot be compiled.
    """
    backend(cache, arena).prepare(cache, arena)


def spill(cache: PagedKv, blocks: Tensor, arena: PagedKv, records: Tensor) -> None:
    """Copy blocks of a cache to records of the arena; see ``reference.spill``.

    Raises:
        SlotError: A number is out of range, or the two lists differ in length.
        LayoutError: The layouts differ inside a block.
    """
    _check(cache, blocks, cache.layout.blocks, "block")
    _check(arena, records, arena.layout.blocks, "record")
    _check_pairs(blocks, records)
    backend(cache, arena).spill(cache, blocks, arena, records)


def warm(arena: PagedKv, records: Tensor, cache: PagedKv, blocks: Tensor) -> None:
    """Copy records of the arena back to blocks of a cache; raises like ``spill``."""
    _check(cache, blocks, cache.layout.blocks, "block")
    _check(arena, records, arena.layout.blocks, "record")
    _check_pairs(blocks, records)
    backend(arena, cache).warm(arena, records, cache, blocks)


def splice(
    source: PagedKv, source_slots: Tensor, target: PagedKv, target_slots: Tensor, delta: Tensor,
    rope: Rope,
) -> None:  # fmt: skip
    """Copy tokens to other positions, K rotated by Δ; see ``reference.splice``.

    Raises:
        SlotError: A slot is out of range (negative ones are skipped), or lengths differ.
        LayoutError: The layouts hold different models.
    """
    _check(source, source_slots, source.layout.slots, "slot", lowest=None)
    _check(target, target_slots, target.layout.slots, "slot", lowest=None)
    _check_pairs(source_slots, target_slots, delta)
    backend(source, target).splice(source, source_slots, target, target_slots, delta, rope)


def rotate_in_place(cache: PagedKv, slots: Tensor, delta: Tensor, rope: Rope) -> None:
    """Rotate keys where they stand; raises like ``splice``."""
    _check(cache, slots, cache.layout.slots, "slot", lowest=None)
    _check_pairs(slots, delta)
    backend(cache).rotate_in_place(cache, slots, delta, rope)


def backend(*memories: PagedKv) -> Backend:
    """What moves these memories' bytes.

    Raises:
        BuildError: Memory is on a GPU and its kernels cannot be compiled.
        KernelError: The switch has a value that is not known.
    """
    return fastest(any(kv.memory.is_cuda for kv in memories))


def _check(kv: PagedKv, numbers: Tensor, limit: int, what: str, lowest: int | None = 0) -> None:
    """Numbers on a GPU are trusted: looking at them would wait for the device."""
    if numbers.is_cuda or not numbers.numel():
        return
    smallest, largest = (int(value) for value in numbers.aminmax())
    if largest >= limit or (lowest is not None and smallest < lowest):
        raise SlotError(
            f"{what} {largest if largest >= limit else smallest} of {kv.layout.name}; "
            f"allowed: 0 to {limit - 1}"
        )


def _check_pairs(*lists: Tensor) -> None:
    lengths = {int(numbers.numel()) for numbers in lists}
    if len(lengths) > 1:
        raise SlotError(f"lists that belong together have lengths {sorted(lengths)}")
