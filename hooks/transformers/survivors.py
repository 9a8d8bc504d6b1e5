"""Which slots of a layer survive when its budget is exceeded."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from .slots.token_table import NOBODY, TokenTable
from .token_ranker import Ranker


class Survivors(NamedTuple):
    """Slots to gather, [batch, n] in the order of the text.

    Attributes:
        slots: int64; the last of each row are the protected ones.
        emptied: bool: a row that keeps fewer than the others has slots that hold nobody, in front.
    """

    slots: Tensor
    emptied: Tensor


def survivors(
    table: TokenTable, budgets: Sequence[int], protected: int, ranker: Ranker
) -> Survivors | None:
    """Choose who stays; None: no row exceeds its budget.

    Args:
        budgets: Tokens that may stay, for each row; at least ``protected``.
        protected: The newest slots, which stay.
    """
    over = [held > allowed for held, allowed in zip(table.valid, budgets, strict=True)]
    if not any(over):
        return None
    protected = min(protected, table.held)
    old = table.held - protected
    position = table.position[:, :old]
    open_to = position != NOBODY
    wanted = _wanted(open_to.sum(1), over, budgets, protected)
    score = ranker.scores(table.memory[:, :old], position, open_to)
    score = score.masked_fill(~open_to, -torch.inf)
    chosen = score.argsort(dim=1, descending=True, stable=True)[:, : int(wanted.max())]
    return _in_order(chosen, position, wanted, old, protected)


def _wanted(have: Tensor, over: list[bool], budgets: Sequence[int], protected: int) -> Tensor:
    """Tokens that each row keeps of those that may be evicted."""
    allowed = torch.tensor([budget - protected for budget in budgets], device=have.device)
    exceeds = torch.tensor(over, device=have.device)
    return torch.where(exceeds, torch.minimum(allowed.clamp_min(0), have), have)


def _in_order(
    chosen: Tensor, position: Tensor, wanted: Tensor, old: int, protected: int
) -> Survivors:
    """The chosen slots by position, those that a row does not want in front, then the newest."""
    batch, count = chosen.shape
    surplus = torch.arange(count, device=chosen.device) >= wanted[:, None]
    place = position.gather(1, chosen).masked_fill(surplus, NOBODY)
    place, order = place.sort(dim=1, stable=True)
    newest = torch.arange(old, old + protected, device=chosen.device).expand(batch, -1)
    slots = torch.cat([chosen.gather(1, order), newest], 1)
    emptied = torch.nn.functional.pad(place == NOBODY, (0, protected))
    return Survivors(slots, emptied)
