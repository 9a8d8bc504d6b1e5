"""``GuardedPool``: a simulated pool that a policy ranks while it finds more than LRU there."""

from __future__ import annotations

from collections.abc import Callable

from ...graph.ranking.policy import Scores
from ...graph.types import Keys, Rows
from ..policies.shadow import Found, RankedShadow, Uses
from ..policies.trust import Trust


class GuardedPool:
    """A pool of another size, or ranked otherwise, under a guard of its own: so does the live pool
    live, see ``policies.guard``.

    While LRU rules, the policy proves itself on what it would hold alone.

    Args:
        capacity: In blocks.
        trust: What the guard thinks of the policy at first; None: there is no guard, and the policy
            always ranks.
        uses: What it follows, as the pools beside it do.
    """

    def __init__(self, capacity: int, trust: Trust | None, uses: Uses) -> None:
        self._held, self._alone = RankedShadow(capacity, uses), RankedShadow(capacity, uses)
        self._trust = trust
        if self._policy_ranks:
            self._alone.leave()

    @property
    def is_guarded(self) -> bool:
        """Whether LRU ranks where it finds more."""
        return self._trust is not None

    @property
    def _policy_ranks(self) -> bool:
        return self._trust is None or self._trust.trusted

    @property
    def capacity(self) -> int:
        """Blocks that it has room for."""
        return self._held.capacity

    def resize(self, capacity: int) -> None:
        """Have room for so many blocks from the next use on."""
        self._held.capacity = self._alone.capacity = capacity
        if self._trust is not None:
            self._trust.capacity = capacity

    def found(self, there: Found, by_lru: int, walked: int) -> int:
        """How many blocks are held, from the first on without a gap.

        Args:
            there: Which pools hold them.
            by_lru: How many of them LRU holds in a pool as large.
            walked: Blocks of the whole request.
        """
        found = there.by(self._held)
        if self._trust is not None:
            by_policy = found if self._trust.trusted else there.by(self._alone)
            self._trust.note(by_policy - by_lru, walked)
        return found

    def start(self, rows: Rows, keys: Keys) -> None:
        """Hold these blocks from now on, the last used first, whatever the pools beside it hold."""
        self._held.restart(rows, keys)
        if not self._policy_ranks:
            self._alone.restart(rows, keys)

    def leave(self) -> None:
        """Follow nothing any more."""
        self._held.leave()
        self._alone.leave()

    def rank(self, keys: Keys, scores: Callable[[Rows], Scores]) -> None:
        """Let whoever found more rank, and the policy rank again.

        Args:
            keys: uint64 by row: what the table's rows hold now.
            scores: The policy's scores of rows; higher goes first.
        """
        if self._trust is not None and self._trust.is_due_for_change():
            self._trust.change_hands()
            if self._trust.trusted:
                self._alone.leave()
            else:
                self._begin_under_lru(keys)
        ranked = self._held if self._policy_ranks else self._alone
        rows = ranked.rows(keys)
        ranked.adopt(rows, scores(rows))

    def _begin_under_lru(self, keys: Keys) -> None:
        self._held.use_up()
        rows = self._held.rows(keys)
        self._alone.restart(rows, keys[rows])
