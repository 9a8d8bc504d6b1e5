"""``TierCacheBridge``: decides what moves between the engine's pool, host memory and disk, and
when."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, Final

from ....graph.messages.advice import EvictionRanking
from ....graph.messages.events import AnyEvent
from ....graph.types import Keys
from ...tiers.budget import TierSettings
from ...tiers.jobs import Load, TierAnswer, TierWork
from ...tiers.ledger import TierLedger
from ..ahead.waiting_line import WaitingLine
from ..idle.idle_engine import IdleEngine
from .first_words import FirstWords
from .idle_writer import IdleWriter
from .loader import Loader
from .no_tiers import NoRecall
from .prefetcher import Prefetcher
from .promises import NoPromises, Promises
from .spiller import Spiller, StepTaken

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.request import Request

    from ..observe.group import ObservedGroup
    from ..pool.index import BlockIndex
    from ..pool.tap import Changes

_NO_JOB: Final = 0  # names no job and no copy: both are numbered from one


class TierCacheBridge:
    """The tiers of one engine: the pool is HOT, copies in memory are WARM, copies on disk COLD.

    Lives in the scheduler's process, on its thread. It decides and records; ``TierWork`` carries
    the decisions to the workers, and their ``TierAnswer``, one or more steps later, makes the
    results visible.

    Args:
        pool: The live block pool.
        group: The observed KV cache group.
        index: Which block holds which key.
        settings: Budgets of one worker.
        ledger: Where copies are recorded.
        emit: Takes each event for the sidecar; must not wait.
        workers: How many workers answer.
        manager: vLLM's record of which request holds which blocks.
        by_priority: Whether vLLM's queue goes by priority.

    Attributes:
        loader, recall: Bring copies back, where they were computed and at other positions.
        keeps_promises: Whether resets are followed for the sake of loads that vLLM waits for.
        promises: Those loads.
        reports: Reports the state of the tiers to the sidecar.
        spiller: Copies blocks before they go.
        line: Who waits in vLLM's queue, and for how many blocks.
        request_unqueued: Told of a request that waited for blocks, and is held after all.
        idle: Wakes the engine for an order that comes while it has nothing to do.
        foresee: Told how many tokens a load may bring next.
        copied: Counts the hashes, from the first on, that can be brought back.
        lend, renewed: As ``PoolTap`` calls them: blocks that need not block a reset; after one.
        adapted: Told which keys, that the engine cached, a LoRA adapter computed.
    """

    def __init__(
        self,
        pool: BlockPool,
        group: ObservedGroup,
        index: BlockIndex,
        settings: TierSettings,
        ledger: TierLedger,
        emit: Callable[[AnyEvent], None],
        workers: int,
        manager: KVCacheManager | None = None,
        by_priority: bool = False,
    ) -> None:
        self.ledger, self.adapted = ledger, ledger.kept_off_disk.update
        self.reports: tuple[Callable[[], AnyEvent], ...] = (ledger.report,)
        self._group, self._pool, self._index = group, pool, index
        self.spiller = Spiller(pool, ledger, index.holders, settings.spill_all)
        self.loader = Loader(group, ledger, self.spiller.load_victims)
        self.foresee, self.copied = self.loader.foresee, ledger.directory.run
        self._idle_writer = IdleWriter.of(pool, group, ledger, self.spiller)
        self.line, self._prefetches = WaitingLine(by_priority, settings.ahead), settings.prefetch
        self.request_unqueued = self.line.leave
        self._prefetcher = Prefetcher(pool, group, index, ledger, emit, self.line, self.loader)
        self.idle = IdleEngine(ledger.clock)
        self.keeps_promises = manager is not None
        none = NoPromises(self.loader, self._prefetcher)
        self.promises: Promises | NoPromises = none if manager is None else Promises(pool, manager)
        self.lend, self.renewed = self.promises.lend, self.promises.renewed
        self._broken: list[Load] = []  # loads that nobody ordered, and vLLM waits for
        self.recall = NoRecall()
        self._found: dict[str, int] = {}  # by request: blocks of its prompt in the pool when asked
        self._first_words = FirstWords(workers, with_disk=settings.keeps_more)

    def request_queued(self, request: Request) -> None:
        """Note that a request waits for blocks in vLLM's queue; a held request needs none yet."""
        self.recall.request_queued(request)
        self.line.join(request, 1 + request.num_tokens // self._group.block_size)

    def request_looked_up(self, request: Request, computed_tokens: int) -> tuple[int | None, bool]:
        """Return what a load can bring of a request's tokens; see ``Loader.request_looked_up``."""
        self.line.close(request.request_id)
        if self._first_words.is_worth_waiting():
            return None, False
        first = self._found[request.request_id] = computed_tokens // self._group.block_size
        if answer := self.loader.remembered(request.request_id, first):
            return self.recall.looked_up(request, first, answer)
        # The last token is always computed: its logits are what the request wants.
        hashes = self._group.hashes(request, request.num_tokens - 1)
        found = self.loader.request_looked_up(request.request_id, hashes[first:], first)
        return self.recall.looked_up(request, first, found)

    def request_scheduled(self, request: Request, blocks: KVCacheBlocks, to_load: int) -> None:
        """Note that a request was given blocks; a load fills ``to_load`` tokens of them."""
        if to_load:
            self.promises.made(request)
        else:
            self.promises.request_resumed(request.request_id)
        self.line.leave(request.request_id)
        found = self._found.pop(request.request_id, 0)
        self._idle_writer.request_scheduled(request, found + to_load // self._group.block_size)
        if found:
            hashes = self._group.hashes(request, found * self._group.block_size)
            self._prefetcher.hit(hashes)
            self.ledger.directory.used(hashes)
        ids = blocks.get_block_ids()[self._group.index] if to_load else ()
        # Last: once a load is ordered, nothing of ours may fail.
        begun = self.recall.request_scheduled(request, ids, to_load)
        self.loader.request_scheduled(request, ids, 0 if begun else to_load)

    def retire(self) -> None:
        """Decide nothing any more: from now on only ``request_resumed``, ``promise_ended``,
        ``outstanding``, ``answered`` and ``owes`` are asked, and resets of the pool are followed.
        """
        self.idle.unbind()
        self.recall = NoRecall()

    def request_resumed(self, request_id: str) -> None:
        """Note that a request runs which we did not schedule: its promise is kept."""
        self.promises.request_resumed(request_id)

    def promise_ended(self, request_id: str) -> None:
        """Note that a request ended, perhaps before the load that it was promised."""
        self.promises.request_finished(request_id)

    def request_finished(self, request_id: str) -> dict[str, Any] | None:
        """Note that a request ended; returns what its caller is to know of its cache."""
        self.line.leave(request_id)
        self._found.pop(request_id, None)
        self._idle_writer.request_finished(request_id, self.recall.exact.get(request_id))
        self.loader.request_finished(request_id)
        self.promise_ended(request_id)
        return self.recall.request_finished(request_id)

    def fail_load(self, request: Request, blocks: KVCacheBlocks) -> None:
        """Fail the load that ``request`` waits for and nobody ordered."""
        self.promises.made(request)
        self._broken.append(_broken_load(request, blocks))

    def offered(self, wanted: Callable[[], Keys | None]) -> int:
        """How many blocks a prefetch would take, after a step's allocations, at most; ``wanted``
        reads which keys the sidecar suggests to bring back, best first."""
        self.line.passed()
        self.idle.stepped()  # first: an order that comes from now on is taken by another step
        return self._prefetcher.offered(wanted()) if self._prefetches else 0

    def step(self, ranking: EvictionRanking | None, offered: int, step: StepTaken) -> TierWork:
        """Decide, after a step's allocations, what the workers shall do.

        Args:
            ranking: The latest advice; None without any.
            offered: See ``offered``.
            step: What was scheduled, and what that took from the pool.
        """
        ledger, tokens = self.ledger, step.tokens
        ledger.costs.step_began(tokens)
        loads = self.loader.take_begun()
        taken = max(1 + tokens // self._group.block_size, step.evicted - loads)
        spare = self.spiller.step(ranking, taken, loads, offered, step)
        self.spiller.copy(self.recall.take_due(), self._group.suffix)
        self._idle_writer.step()
        if offered:
            self._prefetcher.step(spare)
        self.idle.worked(bool(tokens or ledger.book.has_new))
        return self.outstanding()  # last: an order that is taken and not returned is lost

    def outstanding(self) -> TierWork:
        """Take the orders that the workers were not given yet."""
        voided = self.ledger.directory.voided.take()  # first: nothing may fail once jobs are taken
        broken, self._broken = tuple(self._broken), []
        return TierWork(self.ledger.book.take() + broken, *voided)

    def step_ended(self) -> None:
        """Note that a step's output arrived."""
        self.ledger.costs.step_ended()

    def answered(self, answer: TierAnswer, received: Iterable[str] = ()) -> None:
        """Take what the workers did, and requests whose loads are over."""
        try:  # said once: what is not heard here is waited for in vain
            self.ledger.book.answer_all(answer.done)
        finally:
            self.promises.received(received)
        if starts := self._first_words.add(answer.starts):
            self.ledger.started(starts)

    @property
    def owes(self) -> bool:
        """Whether the engine must go on stepping to learn the end of a job.

        A write to the disk does not count: no request waits for it, and a disk may hang.
        """
        return bool(self._broken or self.ledger.book.pressing)

    @property
    def busy(self) -> bool:
        """Whether it must go on stepping for that, to begin a job, or to take an order."""
        return bool(self.owes or self.recall.busy or self.idle.due)

    def changed(self, changes: Changes) -> None:
        """Note what a step cached and evicted, and whether the prefix cache was reset then."""
        self.recall.cached(changes.cached)
        if changes.evicted and (self.ledger.kept_off_disk or self._prefetcher.waits):
            keys = changes.evicted.keys.tolist()
            _forget_lost(self.ledger.kept_off_disk, self._pool, changes.evicted, keys)
            self._prefetcher.evicted(keys)
        if changes.then_reset:
            self._index.catch_up()  # while it is known which of the evicted blocks have copies
            self.clear()

    def clear(self) -> None:
        """Drop all copies: the prefix cache was reset, perhaps for new weights."""
        self._prefetcher.clear()
        self.drop_copies()

    def drop_copies(self) -> bool:
        """Give up what the colder tiers hold; False while a request waits for some of it."""
        self.ledger.clear()
        self.recall.clear()
        self._idle_writer.end()
        self.spiller.look_again()
        return not self.promises.binding

    def copies(self) -> list[AnyEvent]:
        """Return every copy, for the sidecar, from the client's thread."""
        return self.ledger.all_copies()


def _forget_lost(
    kept_off: set[int], pool: BlockPool, hashes: Sequence[bytes], keys: Sequence[int]
) -> None:
    """Forget of evicted blocks those that the pool holds no more.

    At once: they may be computed again.
    """
    if not kept_off.isdisjoint(keys):
        block_of = pool.cached_block_hash_to_block.get_one_block
        both = zip(hashes, keys, strict=True)
        kept_off.difference_update([
            key for each, key in both if key in kept_off and block_of(each) is None
        ])  # fmt: skip


def _broken_load(request: Request, blocks: KVCacheBlocks) -> Load:
    """Return a load that is to fail.

    Only the blocks that it was to fill are named: what the prefix cache held is sound, and vLLM
    would set back every request that shares it.
    """
    (group,) = blocks.blocks
    empty = tuple(block.block_id for block in group if block.block_hash is None)
    return Load(_NO_JOB, (_NO_JOB,) * len(empty), empty, {}, request.request_id)
