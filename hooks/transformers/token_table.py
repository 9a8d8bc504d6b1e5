"""What is known of each stored token of a layer: where it stood, since when, what it is worth."""

from __future__ import annotations

import torch
from torch import Tensor

NOBODY = -1  # the position of a slot that holds no token: padding, or a row that keeps fewer


class TokenTable:
    """Columns over the slots of a store, [batch, held], in the order of the text.

    Attributes:
        position: int64, the token's place in the text, padding counted; ``NOBODY``: none.
        step: int32, the call at which it was stored; 0 is the prompt.
        memory: float32, what the ranker remembers of its attention.
    """

    def __init__(self, batch: int, device: torch.device) -> None:
        self.position = torch.empty((batch, 0), dtype=torch.int64, device=device)
        self.step = torch.empty((batch, 0), dtype=torch.int32, device=device)
        self.memory = torch.empty((batch, 0), dtype=torch.float32, device=device)
        self.seen = 0
        self.calls = 0
        self.valid = [0] * batch

    @property
    def held(self) -> int:
        """Slots."""
        return int(self.position.shape[1])

    @property
    def full(self) -> bool:
        """Whether every slot holds a token."""
        return min(self.valid) == self.held

    def append(self, count: int, present: Tensor | None) -> None:
        """Add ``count`` slots; ``present`` [batch, count] says which hold a token, None: all."""
        batch, device = self.position.shape[0], self.position.device
        place = torch.arange(self.seen, self.seen + count, device=device).expand(batch, -1)
        if present is not None:
            place = place.masked_fill(~present, NOBODY)
        self.position = torch.cat([self.position, place], 1)
        step = torch.full((batch, count), self.calls, dtype=torch.int32, device=device)
        self.step = torch.cat([self.step, step], 1)
        self.memory = torch.nn.functional.pad(self.memory, (0, count))
        self.seen += count
        self.calls += 1
        self._count(count if present is None else present.sum(1).tolist())

    def keep(self, slots: Tensor, emptied: Tensor) -> None:
        """Gather slots [batch, n]; those ``emptied`` hold nobody from now on."""
        self.position = self.position.gather(1, slots).masked_fill(emptied, NOBODY)
        self.step = self.step.gather(1, slots)
        self.memory = self.memory.gather(1, slots).masked_fill(emptied, 0.0)
        self.valid = (self.position != NOBODY).sum(1).tolist()

    def select(self, rows: Tensor) -> None:
        """Take rows of the batch [n], each as often as it is named."""
        self.position, self.step = self.position[rows], self.step[rows]
        self.memory = self.memory[rows]
        self.valid = [self.valid[row] for row in rows.tolist()]

    def _count(self, more: int | list[int]) -> None:
        added = [more] * len(self.valid) if isinstance(more, int) else more
        self.valid = [now + new for now, new in zip(self.valid, added, strict=True)]
