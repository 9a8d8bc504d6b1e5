"""``TierCacheBridge``: decides what moves between pool, host memory and disk, and when."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Final

from ....graph.types import Keys
from ....graph.wire.advice import EvictionRanking
from ....graph.wire.events import AnyEvent
from ...settings import TierSettings
from ...tiers.jobs import Load, TierAnswer, TierWork, WorkerStart
from ...tiers.ledger import TierLedger
from ..calls import BlockIds, Calls, Found
from .idle import IdleEngine, IdleWriter
from .loader import Loader
from .prefetcher import Prefetcher, WaitingLine
from .spiller import Rest, Spiller, StepTaken

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks, KVCacheManager
    from vllm.v1.core.kv_cache_utils import KVCacheBlock
    from vllm.v1.request import Request

    from ...._engine import Core
    from ..groups import ObservedGroup
    from ..index import BlockIndex
    from ..tap import Changes

_LOOKUPS_IN_VAIN: Final = 64  # lookups that wait for workers' reports of their disks; chosen


class WorkerStarts:
    """Each worker's report at its start. ``with_disk``: there may be records on disks."""

    def __init__(self, workers: int, with_disk: bool) -> None:
        self._workers = workers
        self._starts: list[WorkerStart] = []
        self._patience = _LOOKUPS_IN_VAIN if with_disk else 0

    def is_worth_waiting(self) -> bool:
        """Return whether a lookup should be repeated later; True a limited number of times. It lets
        the first requests after a start use the disk.
        """
        if not self._patience or len(self._starts) == self._workers:
            return False
        self._patience -= 1
        return True

    def add(self, starts: Iterable[WorkerStart]) -> Sequence[WorkerStart]:
        """Add workers' reports; returns all workers' reports once, when the last one has come."""
        for start in starts:
            if len(self._starts) < self._workers:
                self._starts.append(start)
                if len(self._starts) == self._workers:
                    return self._starts
        return ()


# Keeps requests that wait for a load from blocking a reset of the prefix cache.
#
# Stock vLLM preempts running requests and then resets its prefix cache. A request that waits for a
# load cannot be preempted. With overlapping steps, the blocks of preempted requests are also kept
# until the running step is over, because a load might write to them. Neither is a reason to refuse
# new weights: the load is void, and its request computes.


class PromisedLoads:
    """Loads promised to vLLM whose requests have not been scheduled since."""

    def __init__(self, pool: BlockPool, manager: KVCacheManager) -> None:
        self._pool = pool
        self._manager = manager
        self._waiting: dict[str, Request] = {}
        self._received: set[str] = set()  # of them, those whose load is over
        self._void: set[str] = set()  # of them, those with a load of what counts no longer

    def __len__(self) -> int:
        return len(self._waiting)

    @property
    def binding(self) -> bool:
        return len(self._waiting) > len(self._received | self._void)

    def made(self, request: Request) -> None:
        """Note that ``request`` waits for a load into its blocks."""
        self._waiting[request.request_id] = request

    def update_state_after_alloc(self, request: Request, _: object, to_load: int) -> None:
        if to_load:
            self.made(request)
        elif self._waiting:
            self._forget(request.request_id)

    def request_finished(self, request: Request, _: object = None) -> None:
        """Note that a request ended. While its load is under way, vLLM keeps its blocks."""
        if request.request_id in self._received:
            self._forget(request.request_id)

    def received(self, request_ids: Iterable[str]) -> None:
        """Note that vLLM learns of these loads' ends, and has learned of failed blocks."""
        for request_id in request_ids:
            request = self._waiting.get(request_id)
            if request is None:
                continue
            if request.is_finished():
                self._forget(request_id)
                continue
            self._received.add(request_id)
            if request_id in self._void:
                self._compute(request)

    def lend(self) -> list[KVCacheBlock]:
        """Return all blocks in use, as often as referenced, if only our requests hold any."""
        (manager,) = self._manager.coordinator.single_type_managers
        others = [name for name in manager.req_to_blocks if name not in self._waiting]
        if any(manager.req_to_blocks[name] for name in others):
            return []
        used = [block for block in self._pool.blocks if block.ref_cnt and not block.is_null]
        return [block for block in used for _ in range(block.ref_cnt)]

    def renewed(self) -> None:
        """Invalidate running loads: the prefix cache was reset, perhaps for new weights."""
        self._void.update(self._waiting)
        for request_id in self._received:
            self._compute(self._waiting[request_id])

    def _compute(self, request: Request) -> None:
        """Start the request over: workers are done with its blocks; nothing is cached."""
        self._manager.free(request)
        request.num_computed_tokens = 0

    def _forget(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        self._received.discard(request_id)
        self._void.discard(request_id)


_NO_WORK: Final = TierWork()
_NO_JOB: Final = 0  # the number of no job and no copy: both count from one


class TierCacheBridge:
    """The tiers of one engine: the pool is HOT, copies in memory are WARM, copies on disk COLD.

    Runs in the scheduler's process, on its thread. It decides and records; ``TierWork`` carries its
    decisions to the workers, whose ``TierAnswer``, one or more steps later, makes the results
    visible.
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
        manager: KVCacheManager,
    ) -> None:
        # told which keys, that the engine cached, follow from names and not from content
        self.ledger, self.named = ledger, ledger.kept_off_disk.update
        self.step_ended = ledger.costs.step_ended  # told that a step's output arrived
        self._group, self._pool, self._index = group, pool, index
        self.spiller = Spiller(pool, ledger, index.holders, settings.spill_all)
        self.loader = Loader(group, ledger, self.spiller.load_victims)
        self._idle_writer = IdleWriter(pool, group, ledger, self.spiller)
        self.line, self.prefetches = WaitingLine(), settings.prefetch
        self._prefetcher = Prefetcher(pool, group, index, ledger, emit, self.line, self.loader)
        self.idle = IdleEngine(ledger.clock)
        self.may_rest = True  # whether no other part has work in each step
        self.rest = Rest(group.block_size, ledger.costs, ledger.clock)
        self.promises = PromisedLoads(pool, manager)
        self._broken: list[Load] = []  # loads that nobody ordered, and vLLM waits for
        self._found: dict[str, int] = {}  # by request: blocks of its prompt in the pool when asked
        self._worker_starts = WorkerStarts(workers, with_disk=settings.keeps_more)

    def on_new_request(self, request: Request) -> None:
        """Note that a request waits for blocks in vLLM's queue; a held request needs none yet."""
        self._wake()
        self.line.join(request.request_id, 1 + request.num_tokens // self._group.block_size)

    def get_num_new_matched_tokens(
        self, request: Request, computed_tokens: int, found: Found
    ) -> Found:
        """Return how many tokens a load can bring; see ``Loader.request_looked_up``."""
        self._wake()
        if found[0] is None:
            return found  # others have to be waited for first
        if self._worker_starts.is_worth_waiting():
            return None, False
        first = self._found[request.request_id] = computed_tokens // self._group.block_size
        if answer := self.loader.remembered(request.request_id, first):
            return answer
        # The last token is always computed: its logits are what the request wants.
        hashes = self._group.hashes(request, request.num_tokens - 1)
        return self.loader.request_looked_up(request.request_id, hashes[first:], first)

    def update_state_after_alloc(
        self, request: Request, blocks: KVCacheBlocks, to_load: int
    ) -> None:
        self.promises.update_state_after_alloc(request, blocks, to_load)
        self._wake()
        self.line.leave(request.request_id)
        found = self._found.pop(request.request_id, 0)
        self._idle_writer.request_scheduled(request, found + to_load // self._group.block_size)
        if found:
            hashes = self._group.hashes(request, found * self._group.block_size)
            self._prefetcher.hit(hashes)
            self.ledger.directory.used(hashes)

    def promised_calls(self) -> Calls:
        """Return the calls that still complete promised loads after an error; nothing new is
        decided.

        No request may wait forever. Running jobs are followed to their end, so that the blocks that
        they fill return to the pool; a load whose orders were never sent goes to the workers as one
        that must fail. Resets are handled for good, because vLLM keeps delaying blocks for loads in
        an engine with tiers; none is refused, since no load is offered any more.
        """
        self.idle.unbind()
        self.rest.steps = []
        return Calls(
            update_state_after_alloc=[self.promises.update_state_after_alloc],
            load_failed=[self.load_failed],
            build_connector_meta=[lambda tokens, preempted: self.outstanding()],
            answered=[self.answered],
            has_pending_push_work=[lambda: self.owes],
            request_finished=[self.promises.request_finished],
        )

    def request_finished(self, request: Request, block_ids: BlockIds) -> None:
        self._wake()
        request_id = request.request_id
        self.line.leave(request_id)
        self._found.pop(request_id, None)
        self._idle_writer.request_finished(request_id)
        self.loader.request_finished(request_id)
        self.promises.request_finished(request)

    def load_failed(self, request: Request, blocks: KVCacheBlocks) -> None:
        """Fail the load that ``request`` waits for, since it was never ordered."""
        self.promises.made(request)
        self._broken.append(_broken_load(request, blocks))
        self.rest.left = -1

    def _wake(self) -> None:
        rest = self.rest
        rest.left = -1
        if steps := rest.steps:
            rest.steps = []
            self.spiller.passed(steps)

    def offered(self, wanted: Callable[[], Keys | None]) -> int:
        """Return how many of the keys ``wanted`` a prefetch would take, best first."""
        self._wake()
        self.idle.stepped()  # first: an order that comes from now on is taken by another step
        return self._prefetcher.offered(wanted()) if self.prefetches else 0

    def spill(self, ranking: EvictionRanking | None, offered: int, step: StepTaken) -> int:
        """Start copies of what is evicted next; returns how many blocks can go without a loss."""
        self.ledger.costs.step_began(step.tokens)
        loads = self.loader.take_begun()
        taken = max(1 + step.tokens // self._group.block_size, step.evicted - loads)
        return self.spiller.step(ranking, taken, loads, offered, step)

    def fetch(self, tokens: int, offered: int, spare: int) -> TierWork:
        """Start disk writes and prefetches in a step; returns the workers' orders."""
        self._idle_writer.step()
        if offered:
            self._prefetcher.step(spare)
        self.idle.worked(bool(tokens or self.ledger.book.has_new))
        left = self.spiller.may_pass if self.may_rest and tokens else -1
        if left >= 0 and not (offered or self._idle_writer.is_busy):
            self.rest.begin(left, self.spiller.usual)
        return self.outstanding()  # last: an order that is taken and not returned is lost

    def outstanding(self) -> TierWork:
        """Return the orders that were not sent to the workers yet, and mark them as sent."""
        if not (self.ledger.book.has_new or self._broken or self.ledger.directory.voided):
            return _NO_WORK
        voided = self.ledger.directory.voided.take()  # first: nothing may fail once jobs are taken
        broken, self._broken = tuple(self._broken), []
        return TierWork(self.ledger.book.take() + broken, *voided)

    def answered(self, answer: TierAnswer, received: Iterable[str] = ()) -> None:
        """Process the workers' answers, and the requests whose loads ended."""
        if not (answer or received):
            return
        try:
            self._wake()
        finally:  # said once: what is not heard here is waited for in vain
            try:
                self.ledger.book.answer_all(answer.done)
            finally:
                self.promises.received(received)
        if starts := self._worker_starts.add(answer.starts):
            self.ledger.started(starts)

    def hears(self, core: Core) -> bool:
        """Return whether ``changed`` would act on any of the evictions that ``core`` noted."""
        kept_off, unused = self.ledger.kept_off_disk, self._prefetcher.unused
        return bool((kept_off or unused) and core.evicts(kept_off, unused))

    @property
    def owes(self) -> bool:
        """Whether the engine must keep stepping to learn that a job ended. A write to the disk does
        not count: no request waits for it, and a disk may hang.
        """
        return bool(self._broken or self.ledger.book.pressing)

    def has_pending_push_work(self) -> bool:
        """Return whether the engine must keep stepping for that, or to send an order."""
        return bool(self.owes or self.idle.due)

    def changed(self, changes: Changes) -> None:
        self._wake()
        if changes.evicted and (self.ledger.kept_off_disk or self._prefetcher.unused):
            keys = changes.evicted.keys.tolist()
            _forget_lost(self.ledger.kept_off_disk, self._pool, changes.evicted, keys)
            self._prefetcher.evicted(keys)
        if changes.then_reset:
            self._index.catch_up()  # while it is known which of the evicted blocks have copies
            self.clear()

    def clear(self) -> None:
        """Drop all copies: the prefix cache was reset, perhaps for new weights."""
        self._prefetcher.clear()
        self.reset_cache()

    def reset_cache(self) -> bool:
        """Drop all copies in colder tiers; returns False while a request waits for one of them."""
        self._wake()
        self.ledger.clear()
        self._idle_writer.end()
        self.spiller.look_again()
        return not self.promises.binding

    def copies(self) -> list[AnyEvent]:
        """Return an event for every copy, for the sidecar; called on the client's thread."""
        return self.ledger.all_copies()


def _forget_lost(
    kept_off: set[int], pool: BlockPool, hashes: Sequence[bytes], keys: Sequence[int]
) -> None:
    """Forget evicted blocks that the pool lacks, at once: they may be computed again."""
    if not kept_off.isdisjoint(keys):
        block_of = pool.cached_block_hash_to_block.get_one_block
        both = zip(hashes, keys, strict=True)
        kept_off.difference_update([
            key for each, key in both if key in kept_off and block_of(each) is None
        ])  # fmt: skip


def _broken_load(request: Request, blocks: KVCacheBlocks) -> Load:
    """Return a load that is to fail. Only the blocks that it was to fill are named: what the prefix
    cache held is sound, and vLLM would set back every request that shares it.
    """
    (group,) = blocks.blocks
    empty = tuple(block.block_id for block in group if block.block_hash is None)
    return Load(_NO_JOB, (_NO_JOB,) * len(empty), empty, {}, request.request_id)
