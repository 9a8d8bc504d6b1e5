"""The rules that bind every policy: what goes first, what is kept, and what is lost last.

Each rule has a weight, a small integer, and each weight is more than all lighter ones together. So
the weightiest rule in which two blocks differ decides between them, whatever the others say. A
policy's score decides only between blocks of equal standing: it is clipped to a band that is
narrower than one step of the ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt

from ..tables.blocks import Selection
from ..types import NO_ROW, BlockFlag, Rows, SessionState, layer_mask
from .copy_worth import COPIES
from .policy import Scores
from .protection import Limit, is_inferred, is_reserved, is_wanted, limited_by
from .view import View

_T = TypeVar("_T", bound=np.generic)
Mask = npt.NDArray[np.bool_]
Ranks = npt.NDArray[np.int8]

SCORE_BOUND: Final = 1e7
"""The largest size of a policy's score; a larger one is clipped to it. Chosen."""

_STEP: Final = 2.0**25
"""Of a score, from one rank to the next: more than two bounds, so that bands never meet; and small
enough that a float64 tells blocks of one band apart by a ten-millionth of a point."""


class Rule(NamedTuple):
    """One rule: ``weight`` is added to the rank of the blocks to which it ``applies``.

    Attributes:
        with_copies: Holds only in an engine with copies: in the others every eviction costs a
            recomputation, and the policy weighs that already.
        bounded: Holds for a share of a pool only; see ``protection.limited_by``.
    """

    name: str
    weight: int
    applies: Callable[[View, Selection], Mask]
    with_copies: bool = False
    bounded: bool = False


def is_superseded(view: View, picked: Selection) -> Mask:
    """Whether only an abandoned branch used the block."""
    return flagged(view, picked, BlockFlag.SUPERSEDED)


def is_over(view: View, picked: Selection) -> Mask:
    """Whether only sessions that ended used the block."""
    sessions = view.sessions
    ended = sessions.state[: sessions.size] == SessionState.ENDED
    if not ended.any():
        return np.zeros(len(picked), dtype=np.bool_)
    over = of_session(ended, picked.of(view.blocks.session))
    over &= ~flagged(view, picked, BlockFlag.SHARED)
    return over


def is_due(view: View, picked: Selection) -> Mask:
    """Whether the block's session waits for a tool and is expected within the horizon."""
    sessions = view.sessions
    due = np.zeros(sessions.size, dtype=np.bool_)
    due[sessions.soon(view.rules.horizon_s, view.now)] = True
    return of_session(due, picked.of(view.blocks.session))


def is_pinned(view: View, picked: Selection) -> Mask:
    """Whether a lease on the block has not expired."""
    return np.asarray(picked.of(view.blocks.pinned_until) > view.now)


def is_protected(view: View, picked: Selection) -> Mask:
    """Whether the block's layer is protected, and a session is likely to ask for it again; where
    an operator says how much is kept, whether any session may.

    Of a block of which nobody said which layer it is: whether it was used more than once, too,
    where such may be protected.
    """
    protected = np.take(layer_mask(view.rules.protected_layers), picked.of(view.blocks.layer))
    if not protected.any():
        return np.asarray(protected)
    inferred = protected & is_inferred(view, picked)
    if inferred.any():
        again = picked.of(view.blocks.walkers) > 1
        protected &= ~inferred | (again & (view.rules.inferred_share > 0))
    told = ~inferred & (view.rules.protected_share is not None)
    return np.asarray(protected & (told | is_wanted(view, picked)) & ~is_over(view, picked))


def beyond_share(view: View) -> Rows:
    """Rows in the pool of the view's engine that a protected layer names or a lease holds, and that
    are evicted like others all the same: more are named than may be kept."""
    resident = view.blocks.pick(view.blocks.resident(view.engine))
    return np.asarray(resident.rows[limits_of_kept(view, resident) != Limit.NONE])


def limits_of_kept(
    view: View, picked: Selection, there: Mask | None = None
) -> npt.NDArray[np.uint8]:
    """uint8 ``[len(picked)]``: the ``Limit`` beyond which each block is that is protected or
    leased; ``there`` as in ``limited_by``."""
    protected, leased = is_protected(view, picked), is_pinned(view, picked)
    return limited_by(view, picked, protected, leased, there)


RULES: Final = (
    Rule("superseded", 4, is_superseded),
    Rule("session_over", 2, is_over),
    Rule("due", -1, is_due, with_copies=True),
    Rule("reserved", -8, is_reserved),
    Rule("pinned", -16, is_pinned, bounded=True),
    Rule("protected_layer", -32, is_protected, bounded=True),
)
"""Higher ranks go first. This list is all there is: rankings and explanations walk it."""

PROTECTED_BELOW: Final = (sum(min(0, rule.weight) for rule in RULES[:-1]) - 0.5) * _STEP
"""Scores under the rules: those of protected blocks are below this, all others above."""


def lay_rules(scores: Scores, view: View, picked: Selection, there: Mask | None = None) -> Scores:
    """float64 ``[len(picked)]``: a policy's scores of blocks that the view's engine holds, under
    the rules.

    The scores themselves are not changed: they may be a view of the graph's columns.

    Args:
        there: bool ``[len(picked)]``: which of them are in the pool; None: all.
    """
    ruled = _in_band(scores)
    ranks = _ranks(view, picked, there)
    if ranks.any():
        places = np.flatnonzero(ranks)  # few: most blocks are like most others
        ruled[places] += ranks[places] * _STEP
    return ruled


def standings(view: View, picked: Selection) -> list[list[str]]:
    """The names of the rules that bind each of ``picked``, in the rules' order.

    Args:
        view: Of the engine that ranks them; of none: what binds them wherever they are held.
    """
    binding = [rule for rule in RULES if not rule.with_copies or _has_copies(view)]
    names = [rule.name for rule in binding]
    each_rule = [rule.applies(view, picked).tolist() for rule in binding]
    columns = zip(*each_rule, strict=True)
    return [[name for name, it in zip(names, each, strict=True) if it] for each in columns]


def _has_copies(view: View) -> bool:
    """Whether the view's engine has copies of any blocks."""
    blocks = view.blocks
    if view.engine == NO_ROW or not blocks.had_copies:
        return blocks.had_copies
    return bool((blocks.tiers[view.engine] & COPIES).any())


def flagged(view: View, picked: Selection, flag: BlockFlag) -> Mask:
    """bool ``[len(picked)]``: which of them carry a flag."""
    return np.asarray((picked.of(view.blocks.flags) & int(flag)) != 0)


def of_session(values: npt.NDArray[_T], session: Rows) -> npt.NDArray[_T]:
    """``values[session]``, and zero for blocks of no session."""
    padded = np.append(values, values.dtype.type(0))  # the last one stands for NO_ROW
    return np.take(padded, session, mode="wrap")


def _in_band(scores: npt.NDArray[Any]) -> Scores:
    """A copy clipped to ``±SCORE_BOUND``; NaN counts as the median of the others."""
    banded = np.clip(np.asarray(scores, dtype=np.float64), -SCORE_BOUND, SCORE_BOUND)
    nonsense = np.isnan(banded)
    if nonsense.any():
        known = banded[~nonsense]
        banded[nonsense] = np.median(known) if known.size else 0.0
    return banded


def _ranks(view: View, picked: Selection, there: Mask | None) -> Ranks:
    """int8 ``[len(picked)]``: the weights of the rules that apply to each, summed."""
    ranks = np.zeros(len(picked), dtype=np.int8)
    has_copies = view.blocks.had_copies
    has_copies &= bool((picked.of(view.blocks.tiers[view.engine]) & COPIES).any())
    beyond: Mask | None = None  # looked for once something is to be kept
    for rule in RULES:
        if rule.with_copies and not has_copies:
            continue
        applies = rule.applies(view, picked)
        if rule.bounded and applies.any():
            if beyond is None:
                beyond = np.asarray(limits_of_kept(view, picked, there) != Limit.NONE)
            applies = applies & ~beyond
        if applies.any():
            ranks += applies * np.int8(rule.weight)
    return ranks
