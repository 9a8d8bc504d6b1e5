"""What a step cached and evicted, worked through on the thread that sends."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import repeat
from typing import TYPE_CHECKING

from ....graph.messages.events import AnyEvent, BlocksCleared, BlocksRemoved, BlocksStored
from ...keys import key_of, pack_keys, pack_run, unpack
from ..pool.packed_hashes import PackedHashes
from ..pool.returned import returned
from ..pool.tap import CachedRun, Changes

if TYPE_CHECKING:
    from collections.abc import Callable

    from ..pool.index import BlockIndex
    from .group import ObservedGroup

_Late = tuple[Sequence[CachedRun], PackedHashes, bool]


class LateChanges:
    """A step's changes, until they are noted in the index and told.

    Is a ``hooks.link.outbox.Later``.

    Args:
        runs: Blocks that were cached, in order.
        changes: What was evicted, and whether the prefix cache was reset after that.
        sessions: Of each run; none where no request has a session.
        reporter: Notes and tells them.
    """

    __slots__ = ("_changes", "_error", "_events", "_reporter", "_sessions")

    def __init__(
        self,
        runs: Sequence[CachedRun],
        changes: Changes,
        sessions: Sequence[str | None],
        reporter: ChangeReporter,
    ) -> None:
        self._changes: _Late | None = runs, changes.evicted, changes.then_reset
        self._sessions = sessions
        self._reporter = reporter
        self._events: list[AnyEvent] | None = None
        self._error: Exception | None = None

    def note(self) -> None:
        """Note the changes in the index, once; never raises.

        What is not noted in full is not found in the index, and its events are lost.
        """
        changes, self._changes = self._changes, None
        if changes is None:
            return
        events: list[AnyEvent] = []
        try:
            events += self._reporter.events(*changes, self._sessions)
        except Exception as error:
            self._error = error
            self._reporter.failed()
        self._events = events

    def events(self) -> list[AnyEvent]:
        """Take what is told of the changes; they are in the index from then on.

        Raises:
            Exception: They could not be made in full.
        """
        self._reporter.catch_up()  # in their order, also where older ones are never told
        events, self._events = self._events or [], []
        if self._error is not None:
            raise self._error
        return events


class ChangeReporter:
    """Notes changes in the index of blocks, and makes their events.

    Works beside the engine's steps, and reads what these only add to: a request's hashes, and its
    list of blocks.

    Args:
        group: The observed KV cache group.
        index: Learns which block holds which key.
        gone: Is told which keys the engine evicted.
    """

    def __init__(
        self, group: ObservedGroup, index: BlockIndex, gone: Callable[[Sequence[int]], None]
    ) -> None:
        self._scale, self._suffix, self._block_size = group.scale, group.suffix, group.block_size
        self._alone = group.groups_take == 1  # so every eviction is its own
        self._index = index
        self._gone = gone

    def catch_up(self) -> None:
        """Note in the index all that changed until now."""
        self._index.catch_up()

    def failed(self) -> None:
        """Note that changes could not be noted in full."""
        self._index.doubt()

    def events(
        self,
        runs: Sequence[CachedRun],
        evicted: PackedHashes,
        then_reset: bool,
        sessions: Sequence[str | None],
    ) -> Iterator[AnyEvent]:
        """What was cached, then the evicted keys that are not cached again, at once."""
        if runs:
            yield from self._stored(runs, sessions or repeat(None))
        if evicted:
            yield from self._removed(runs, evicted)
        if then_reset:
            self._index.clear()
            yield BlocksCleared()

    def _stored(self, runs: Sequence[CachedRun], sessions: Iterable[str | None]) -> list[AnyEvent]:
        told = self._told(runs, sessions)
        keys = unpack(b"".join([event.hashes for event in told]))
        ids = [block.block_id for _, blocks, first, end in runs for block in blocks[first:end]]
        self._index.cached(keys, ids)
        return list(told)

    def _told(
        self, runs: Sequence[CachedRun], sessions: Iterable[str | None]
    ) -> list[BlocksStored]:
        scale, size, events = self._scale, self._block_size, list[BlocksStored]()
        for (hashes, _, first, end), session in zip(runs, sessions, strict=False):
            packed = pack_run(hashes, first, end, scale)
            parent = key_of(hashes[scale * first - 1]) if first else None
            events.append(BlocksStored(packed, parent, size, session))
        return events

    def _removed(self, runs: Sequence[CachedRun], evicted: PackedHashes) -> Iterator[AnyEvent]:
        """One event says all that left in the step, and others what came back in it."""
        of_ours = evicted if self._alone else evicted.of_group(self._suffix)
        keys = of_ours.keys.tolist()
        gone = self._index.forget(of_ours, keys)
        if gone:
            self._gone(gone)
        back = self._told(returned(runs, keys, gone, self._scale), repeat(None))
        if gone or back:
            yield BlocksRemoved(pack_keys(gone) + b"".join([event.hashes for event in back]))
        yield from back
