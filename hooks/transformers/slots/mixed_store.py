"""A layer's keys and values with the newest as they are and all older ones in int8."""

from __future__ import annotations

import torch
from torch import Tensor

from ....kernels.backends.mixed_attention import Part
from ....kernels.maths.channel_quant import channel_scale, rescaled, to_cells
from .slot_room import room_for
from .stores import FloatStore, gathered


class Cells:
    """int8 tokens of one plane, keys or values, with a scale per head and channel.

    A scale only grows: where a new token does not fit, the cells of its channel are expressed anew.

    Args:
        most: Tokens, unless a prompt brings more.
    """

    def __init__(self, like: Tensor, most: int) -> None:
        batch, heads, _, dims = like.shape
        self._most = most
        self.cells = like.new_empty((batch, heads, 0, dims), dtype=torch.int8)
        self.scale = like.new_zeros((batch, heads, dims), dtype=torch.float32)

    def append(self, values: Tensor, at: int) -> None:
        """Put tokens into the cells from ``at`` on."""
        scale = torch.maximum(self.scale, channel_scale(values))
        if at and not torch.equal(scale, self.scale):
            self.cells[:, :, :at] = rescaled(self.cells[:, :, :at], self.scale, scale)
        self.scale = scale
        if (after := at + values.shape[2]) > self.cells.shape[2]:
            self._move(room_for(after, self._most), self.cells[:, :, :at])
        self.cells[:, :, at:after] = to_cells(values, scale)

    def keep(self, slots: Tensor) -> None:
        """Gather slots to the front, and give back the room that they do not need."""
        kept, held = gathered(self.cells, slots), slots.shape[1]
        if self.cells.shape[2] > (room := room_for(held, self._most)):
            self._move(room, kept)
            return
        self.cells[:, :, :held] = kept

    def select(self, rows: Tensor) -> None:
        """Take rows of the batch."""
        self.cells, self.scale = self.cells[rows], self.scale[rows]

    def bytes(self) -> int:
        """Bytes that are allocated."""
        return int(self.cells.nbytes + self.scale.nbytes)

    def _move(self, room: int, cells: Tensor) -> None:
        batch, heads, held, dims = cells.shape
        self.cells = cells.new_empty((batch, heads, room, dims))
        self.cells[:, :, :held] = cells


class MixedStore:
    """The newest tokens in the model's own type, older ones in int8, both oldest first.

    Tokens move to int8 in groups: when ``window + group`` stand in the model's type, the oldest
    ``group`` of them go.

    Args:
        keys, values: Some of the layer's, whose widths may differ.
        most: Tokens, unless a prompt brings more.
    """

    def __init__(self, keys: Tensor, values: Tensor, most: int, window: int, group: int) -> None:
        self._window, self._group = window, group
        self._old = 0
        self._recent = FloatStore(keys, values, window + group)
        self._planes = Cells(keys, most - window), Cells(values, most - window)

    @property
    def held(self) -> int:
        """Tokens that are held."""
        return self._old + self._recent.held

    @property
    def recent(self) -> int:
        """Tokens that stand in the model's own type: the window, and up to a group more."""
        return self._recent.held

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Put tokens behind the others, and move what is old enough to int8."""
        self._recent.append(keys, values)
        if (leaving := self._recent.held - self._window) >= self._group:
            self._demote(leaving)

    def keep(self, slots: Tensor) -> None:
        """Gather slots to the front; they hold the whole window, and more of the newest."""
        recent = self._recent.held
        old = slots[:, : slots.shape[1] - recent]
        for plane in self._planes:
            plane.keep(old)
        self._old = old.shape[1]

    def parts(self) -> list[Part]:
        """The int8 part, if any, and the newest."""
        keys, values = self._planes
        recent = self._recent.parts()
        if not self._old:
            return recent
        old = Part(
            keys.cells[:, :, : self._old], values.cells[:, :, : self._old], keys.scale, values.scale
        )
        return [old, *recent]

    def select(self, rows: Tensor) -> None:
        """Take rows of the batch."""
        self._recent.select(rows)
        for plane in self._planes:
            plane.select(rows)

    def room(self, valid: int) -> float:
        """Tokens in int8 count half, and the scales of both planes (four bytes each) are two."""
        old = max(0, valid - self.recent)
        return (valid - old) + (old / 2 + 2 if self._old else 0)

    def bytes(self) -> int:
        """Bytes that are allocated."""
        return self._recent.bytes() + sum(plane.bytes() for plane in self._planes)

    def _demote(self, count: int) -> None:
        """Move the oldest ``count`` tokens of the model's type to int8."""
        keys, values = self._recent.keys, self._recent.values
        for plane, tokens in zip(self._planes, (keys, values), strict=True):
            plane.append(tokens[:, :, :count], self._old)
        self._old += count
        rest = torch.arange(count, self._recent.held, device=keys.device)
        self._recent.keep(rest.expand(keys.shape[0], -1))
