"""What is known of each stored token of a layer: where it stood, and what it is worth."""

from __future__ import annotations

import torch
from torch import Tensor

from .slot_room import room_for

NOBODY = -1  # the position of a slot that holds no token: padding, or a row that keeps fewer


class TokenTable:
    """Columns over the slots of a store, [batch, held], in the order of the text.

    Args:
        most: Slots, unless a prompt brings more.

    Attributes:
        memory: float32, what the ranker remembers of each token's attention.
        held: Slots.
        seen: Tokens of the text so far.
        valid: Tokens of each row.
    """

    def __init__(self, batch: int, device: torch.device, most: int = 0) -> None:
        self._most = most
        self._places = torch.empty((batch, 0), dtype=torch.int64, device=device)
        self.memory = torch.empty((batch, 0), dtype=torch.float32, device=device)
        self.held = 0
        self.seen = 0
        self.valid = [0] * batch

    @property
    def position(self) -> Tensor:
        """int64, each token's place in the text, padding counted; ``NOBODY``: none."""
        return self._places[:, : self.held]

    @property
    def full(self) -> bool:
        """Whether every slot holds a token."""
        return min(self.valid) == self.held

    def append(self, count: int, present: Tensor | None) -> None:
        """Add ``count`` slots; ``present`` [batch, count] says which hold a token, None: all."""
        begin, end = self.held, self.held + count
        if end > (room := self._places.shape[1]):
            more = room_for(end, self._most) - room
            self._places = torch.nn.functional.pad(self._places, (0, more))
        device = self._places.device
        self._places[:, begin:end] = torch.arange(self.seen, self.seen + count, device=device)
        if present is not None:
            self._places[:, begin:end].masked_fill_(~present, NOBODY)
        self.memory = torch.nn.functional.pad(self.memory, (0, count))
        self.held = end
        self.seen += count
        self._count(count if present is None else present.sum(1).tolist())

    def keep(self, slots: Tensor, emptied: Tensor) -> None:
        """Gather slots [batch, n]; those ``emptied`` hold nobody from now on."""
        position = self.position.gather(1, slots).masked_fill(emptied, NOBODY)
        self.held = slots.shape[1]
        if self._places.shape[1] > (room := room_for(self.held, self._most)):
            self._places = self._places.new_empty((len(position), room))
        self._places[:, : self.held] = position
        self.memory = self.memory.gather(1, slots).masked_fill(emptied, 0.0)
        self.valid = (self.position != NOBODY).sum(1).tolist()

    def select(self, rows: Tensor) -> None:
        """Take rows of the batch [n], each as often as it is named."""
        self._places, self.memory = self._places[rows], self.memory[rows]
        self.valid = [self.valid[row] for row in rows.tolist()]

    def _count(self, more: int | list[int]) -> None:
        added = [more] * len(self.valid) if isinstance(more, int) else more
        self.valid = [now + new for now, new in zip(self.valid, added, strict=True)]
