"""What a back end must offer. A back end is a module whose functions have these signatures.

``reference`` says in full what each operation does and defines its result: every other back end
leaves the same bits, in the bytes that were addressed and in all others. Block numbers, slots and Δ
are int64 and stand in host memory, unless a back end says otherwise; ``ops`` has checked them.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

from ..layout.addressed import Blocks, SlotMap
from ..layout.layout import PagedKv
from ..maths.rope import Rope
from ..tensors import Tensor


class Backend(Protocol):
    """Moves the bytes of paged memories."""

    def prepare(self, cache: PagedKv, arena: PagedKv) -> None:
        """Compile and measure now what the first moves between the two would wait for otherwise.

        Raises:
            BuildError: A kernel cannot be compiled.
        """

    def spill(self, blocks: Blocks, records: Blocks) -> None:
        """Copy blocks [n] of a cache, byte for byte, to records [n] of the arena.

        Raises:
            LayoutError: The two differ inside a block, or this back end cannot address them.
        """

    def load(self, records: Blocks, blocks: Blocks) -> None:
        """Copy records [n] of the arena back to blocks [n] of a cache; raises like ``spill``."""

    def splice(self, source: PagedKv, target: PagedKv, slots: SlotMap, rope: Rope) -> None:
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
