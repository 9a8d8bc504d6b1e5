"""Stores a layer's keys and values in consecutive slots, oldest first, with spare capacity."""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from ...kernels.backends.mixed import KvPart
from ...kernels.quant import channel_scale, rescaled, to_cells

_LEAST: Final = 16  # least spare slots after a reallocation, if the capacity allows; chosen
_PARTS: Final = 4  # divisor: a quarter of the held tokens is spare, if that is more; chosen


def room_for(held: int, most: int) -> int:
    """Return the capacity for ``held`` tokens and some spare, at most ``most``."""
    return max(held, min(most, held + max(_LEAST, held // _PARTS)))


class FloatStore:
    """Keys and values in the model's own type, contiguous; both [batch, heads, held, dims]. The
    arguments ``keys`` and ``values`` only show type and shape; ``most`` is the capacity, unless a
    prompt is longer.
    """

    def __init__(self, keys: Tensor, values: Tensor, most: int) -> None:
        self._most = most
        self.held = 0
        self._keys, self._values = _room(keys, 0), _room(values, 0)

    @property
    def keys(self) -> Tensor:
        return self._keys[:, :, : self.held]

    @property
    def values(self) -> Tensor:
        return self._values[:, :, : self.held]

    def append(self, keys: Tensor, values: Tensor) -> None:
        """Append tokens [batch, heads, tokens, dims]."""
        after = self.held + keys.shape[2]
        if after > self._keys.shape[2]:
            self._move(room_for(after, self._most), self.keys, self.values)
        self._keys[:, :, self.held : after] = keys
        self._values[:, :, self.held : after] = values
        self.held = after

    def keep(self, slots: Tensor) -> None:
        """Keep only slots [batch, n]; the last ones of each row are the newest, in order."""
        keys, values = gathered(self._keys, slots), gathered(self._values, slots)
        self.held = slots.shape[1]
        if self._keys.shape[2] > (room := room_for(self.held, self._most)):
            self._move(room, keys, values)
            return
        self._keys[:, :, : self.held] = keys
        self._values[:, :, : self.held] = values

    def parts(self) -> list[KvPart]:
        """Return all tokens, as attention reads them."""
        return [KvPart(self.keys, self.values)]

    def select(self, rows: Tensor) -> None:
        """Select rows of the batch [n]; a row may be selected more than once."""
        self._keys, self._values = self._keys[rows], self._values[rows]

    def room(self, valid: int) -> float:
        """Return the size of ``valid`` tokens, counted in tokens of 16-bit numbers."""
        return float(valid)

    def bytes(self) -> int:
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
    """Return ``slots`` [batch, n] of ``values`` [batch, heads, tokens, dims] for all heads."""
    batch, heads, tokens, dims = values.shape
    begin = torch.arange(batch * heads, device=values.device).view(batch, heads, 1) * tokens
    rows = (slots[:, None, :] + begin).flatten()  # a token of a head is one run of memory
    return values.reshape(-1, dims).index_select(0, rows).view(batch, heads, -1, dims)


class Cells:
    """int8 tokens of keys or values, with a scale per head and channel. A scale only grows: if a
    new token exceeds it, the cells of its channel are quantised again.
    """

    def __init__(self, like: Tensor, most: int) -> None:
        batch, heads, _, dims = like.shape
        self._most = most
        self.cells = like.new_empty((batch, heads, 0, dims), dtype=torch.int8)
        self.scale = like.new_zeros((batch, heads, dims), dtype=torch.float32)

    def append(self, values: Tensor, at: int) -> None:
        """Write tokens into the cells from index ``at`` on."""
        scale = torch.maximum(self.scale, channel_scale(values))
        if at and not torch.equal(scale, self.scale):
            self.cells[:, :, :at] = rescaled(self.cells[:, :, :at], self.scale, scale)
        self.scale = scale
        if (after := at + values.shape[2]) > self.cells.shape[2]:
            self._move(room_for(after, self._most), self.cells[:, :, :at])
        self.cells[:, :, at:after] = to_cells(values, scale)

    def keep(self, slots: Tensor) -> None:
        kept, held = gathered(self.cells, slots), slots.shape[1]
        if self.cells.shape[2] > (room := room_for(held, self._most)):
            self._move(room, kept)
            return
        self.cells[:, :, :held] = kept

    def select(self, rows: Tensor) -> None:
        self.cells, self.scale = self.cells[rows], self.scale[rows]

    def bytes(self) -> int:
        return int(self.cells.nbytes + self.scale.nbytes)

    def _move(self, room: int, cells: Tensor) -> None:
        batch, heads, held, dims = cells.shape
        self.cells = cells.new_empty((batch, heads, room, dims))
        self.cells[:, :, :held] = cells


class MixedStore:
    """The newest tokens in the model's own type, older ones in int8, both oldest first.

    Tokens move to int8 in groups: as soon as ``window + group`` tokens are in the model's type, the
    oldest ``group`` of them move.
    """

    def __init__(self, keys: Tensor, values: Tensor, most: int, window: int, group: int) -> None:
        self._window, self._group = window, group
        self._old = 0
        self._recent = FloatStore(keys, values, window + group)
        self._planes = Cells(keys, most - window), Cells(values, most - window)

    @property
    def held(self) -> int:
        return self._old + self._recent.held

    @property
    def recent(self) -> int:
        """Number of tokens in the model's own type: the window, and up to one group more."""
        return self._recent.held

    def append(self, keys: Tensor, values: Tensor) -> None:
        self._recent.append(keys, values)
        if (leaving := self._recent.held - self._window) >= self._group:
            self._demote(leaving)

    def keep(self, slots: Tensor) -> None:
        """Keep only ``slots``, which include all tokens in the model's own type."""
        recent = self._recent.held
        old = slots[:, : slots.shape[1] - recent]
        for plane in self._planes:
            plane.keep(old)
        self._old = old.shape[1]

    def parts(self) -> list[KvPart]:
        keys, values = self._planes
        recent = self._recent.parts()
        if not self._old:
            return recent
        old = KvPart(
            keys.cells[:, :, : self._old], values.cells[:, :, : self._old], keys.scale, values.scale
        )
        return [old, *recent]

    def select(self, rows: Tensor) -> None:
        self._recent.select(rows)
        for plane in self._planes:
            plane.select(rows)

    def room(self, valid: int) -> float:
        """Count int8 tokens half, and the scales of both planes (four bytes each) as two tokens."""
        old = max(0, valid - self.recent)
        return (valid - old) + (old / 2 + 2 if self._old else 0)

    def bytes(self) -> int:
        return self._recent.bytes() + sum(plane.bytes() for plane in self._planes)

    def _demote(self, count: int) -> None:
        """Move the oldest ``count`` tokens of the model's type to int8."""
        keys, values = self._recent.keys, self._recent.values
        for plane, tokens in zip(self._planes, (keys, values), strict=True):
            plane.append(tokens[:, :, :count], self._old)
        self._old += count
        rest = torch.arange(count, self._recent.held, device=keys.device)
        self._recent.keep(rest.expand(keys.shape[0], -1))
