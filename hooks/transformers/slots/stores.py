"""Where a layer's keys and values stand: one run of slots, oldest first, with room for more."""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor

from ....kernels.backends.mixed_attention import Part
from .slot_room import room_for


class Store(Protocol):
    """Slots of one layer; slot numbers count what is held, from the oldest."""

    held: int

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Put tokens [batch, heads, tokens, dims] behind the others."""

    def keep(self, slots: Tensor) -> None:
        """Gather slots [batch, n] to the front; the last of each row are the newest, in order."""

    def parts(self) -> list[Part]:
        """All that is held, as attention reads it."""

    def select(self, rows: Tensor) -> None:
        """Take rows of the batch [n], each as often as it is named."""

    def room(self, valid: int) -> float:
        """What ``valid`` tokens take, in tokens of two bytes a number: int8 counts half."""

    def bytes(self) -> int:
        """Bytes that are allocated."""


class FloatStore:
    """Keys and values as the model made them, contiguous.

    Args:
        keys, values: Some of the layer's, whose widths may differ.
        most: Tokens, unless a prompt brings more.
    """

    def __init__(self, keys: Tensor, values: Tensor, most: int) -> None:
        self._most = most
        self.held = 0
        self._keys, self._values = _room(keys, 0), _room(values, 0)

    @property
    def keys(self) -> Tensor:
        """What is held, [batch, heads, held, dims]: a view."""
        return self._keys[:, :, : self.held]

    @property
    def values(self) -> Tensor:
        """Likewise."""
        return self._values[:, :, : self.held]

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Put tokens behind the others."""
        after = self.held + keys.shape[2]
        if after > self._keys.shape[2]:
            self._move(room_for(after, self._most), self.keys, self.values)
        self._keys[:, :, self.held : after] = keys
        self._values[:, :, self.held : after] = values
        self.held = after

    def keep(self, slots: Tensor) -> None:
        """Gather slots to the front, and give back the room that they do not need."""
        keys, values = gathered(self._keys, slots), gathered(self._values, slots)
        self.held = slots.shape[1]
        if self._keys.shape[2] > (room := room_for(self.held, self._most)):
            self._move(room, keys, values)
            return
        self._keys[:, :, : self.held] = keys
        self._values[:, :, : self.held] = values

    def parts(self) -> list[Part]:
        """One part."""
        return [Part(self.keys, self.values)]

    def select(self, rows: Tensor) -> None:
        """Take rows of the batch."""
        self._keys, self._values = self._keys[rows], self._values[rows]

    def room(self, valid: int) -> float:
        """Each is a token."""
        return float(valid)

    def bytes(self) -> int:
        """Bytes that are allocated."""
        return int(self._keys.nbytes + self._values.nbytes)

    def _move(self, room: int, keys: Tensor, values: Tensor) -> None:
        held = keys.shape[2]
        self._keys, self._values = _room(keys, room), _room(values, room)
        self._keys[:, :, :held] = keys
        self._values[:, :, :held] = values


def _room(like: Tensor, capacity: int) -> Tensor:
    batch, heads, _, dims = like.shape
    return like.new_empty((batch, heads, capacity, dims))


def gathered(values: Tensor, slots: Tensor) -> Tensor:
    """Slots [batch, n] of values [batch, heads, tokens, dims], the same for all heads."""
    batch, heads, tokens, dims = values.shape
    begin = torch.arange(batch * heads, device=values.device).view(batch, heads, 1) * tokens
    rows = (slots[:, None, :] + begin).flatten()  # a token of a head is one run of memory
    return values.reshape(-1, dims).index_select(0, rows).view(batch, heads, -1, dims)
