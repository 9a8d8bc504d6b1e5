"""What a back end must offer. A back end is a module whose functions have these signatures.

``reference`` says in full what each operation does and is the truth: every other back end leaves
the same bits, in the bytes that were addressed and in all others. Numbers and Δ are int64 and
stand in host memory, unless a back end says otherwise; ``ops`` has checked them before.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from ..layout.layout import PagedKv
from ..maths.rope import Rope
from ..tensors import Tensor


class Backend(Protocol):
    """Moves the bytes of paged memories."""

    def prepare(self, cache: PagedKv, arena: PagedKv) -> None:
        """Do now, slowly, what the first moves between the two would else wait for.

        Raises:
            BuildError: A kernel cannot be compiled.
        """

    def spill(self, cache: PagedKv, blocks: Tensor, arena: PagedKv, records: Tensor) -> None:
        """Copy blocks [n] of a cache, byte for byte, to records [n] of the arena.

        Raises:
            LayoutError: The two differ inside a block, or this back end cannot address them.
        """

    def warm(self, arena: PagedKv, records: Tensor, cache: PagedKv, blocks: Tensor) -> None:
        """Copy records [n] of the arena back to blocks [n] of a cache; raises like ``spill``."""

    def splice(
        self, source: PagedKv, source_slots: Tensor, target: PagedKv, target_slots: Tensor,
        delta: Tensor, rope: Rope,
    ) -> None:  # fmt: skip
        """Copy tokens [T] to other slots [T]: K rotated by Δ [T], V as it is.

        Raises:
            LayoutError: The layouts hold different models, or this back end cannot address them.
        """

    def rotate_in_place(self, cache: PagedKv, slots: Tensor, delta: Tensor, rope: Rope) -> None:
        """Rotate the keys of slots [T] by Δ [T] where they stand; raises like ``splice``."""


class Confidence(NamedTuple):
    """How sure a model is of its next token, from logits [rows, vocabulary]; each float32 [rows].

    Attributes:
        entropy: Of the distribution, divided by log(vocabulary): 0 is certain, 1 is uniform.
        margin: Log-probability of the first choice minus that of the second.
        top_mass: Probability of the first choice.
    """

    entropy: Tensor
    margin: Tensor
    top_mass: Tensor


class Observer(Protocol):
    """Reads what a decode step looked at and how sure the model was; ``attention`` is the truth."""

    def attention_mass(
        self, cache: PagedKv, layer: int, queries: Tensor, block_table: Tensor, lengths: Tensor,
        scale: float,
    ) -> Tensor:  # fmt: skip
        """Share of one layer's attention that each block gets, float32 [S, max blocks]."""

    def confidence(self, logits: Tensor) -> Confidence:
        """Entropy, margin and top mass of each row of logits [rows, vocabulary]."""
