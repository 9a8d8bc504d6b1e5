"""``TierCacheBridge``: decides what moves between the engine's pool, host memory and disk, and
when.
"""

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

# ``WorkerStarts``: what each worker reports once, at its start: its memory and its disk.

_LOOKUPS_IN_VAIN: Final = 64  # before the workers have reported what their disks hold; chosen


class WorkerStarts:
    """Collects what each worker reports at its start, until all have; ``with_disk``:
    they may have found records on their disks.
    """

    def __init__(self, workers: int, with_disk: bool) -> None:
        self._workers = workers
        self._starts: list[WorkerStart] = []
        self._patience = _LOOKUPS_IN_VAIN if with_disk else 0

    def is_worth_waiting(self) -> bool:
        """Whether a lookup should ask again later; True a bounded number of times. The first
        requests after a start are those that could use the disk.
        """
        if not self._patience or len(self._starts) == self._workers:
            return False
        self._patience -= 1
        return True

    def add(self, starts: Iterable[WorkerStart]) -> Sequence[WorkerStart]:
        """Add workers' reports; returns the reports of all workers once, when the last has come."""
        for start in starts:
            if len(self._starts) < self._workers:
                self._starts.append(start)
                if len(self._starts) == self._workers:
                    return self._starts
        return ()


# Keeps requests that wait for a load from blocking a reset of the prefix cache.
#
# Stock vLLM preempts running requests and then resets its prefix cache. A request that waits
# for a load cannot be preempted; and with overlapping steps, the blocks of preempted requests
# are held back until the step under way is over, because a load might write to them. Neither is
# a reason to refuse new weights: the load is void, and its request computes.


class PromisedLoads:
    """Loads that vLLM was promised, whose requests were not scheduled since."""

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
        """Note that vLLM is about to learn that these loads are over, and has learned of failed
        blocks.
        """
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
        """Return all blocks in use, each as often as it is held, if only our requests hold any."""
        (manager,) = self._manager.coordinator.single_type_managers
        others = [name for name in manager.req_to_blocks if name not in self._waiting]
        if any(manager.req_to_blocks[name] for name in others):
            return []
        used = [block for block in self._pool.blocks if block.ref_cnt and not block.is_null]
        return [block for block in used for _ in range(block.ref_cnt)]

    def renewed(self) -> None:
        """Void the loads under way: the prefix cache was reset, perhaps for new weights."""
        self._void.update(self._waiting)
        for request_id in self._received:
            self._compute(self._waiting[request_id])

    def _compute(self, request: Request) -> None:
        """Start the request over: every worker is done with its blocks, and vLLM finds nothing to
        cache.
        """
        self._manager.free(request)
        request.num_computed_tokens = 0

    def _forget(self, request_id: str) -> None:
        self._waiting.pop(request_id, None)
        self._received.discard(request_id)
        self._void.discard(request_id)


_NO_WORK: Final = TierWork()
_NO_JOB: Final = 0  # names no job and no copy: both are numbered from one


class TierCacheBridge:
    """The tiers of one engine: the pool is HOT, copies in memory are WARM, copies on disk COLD.

    Lives in the scheduler's process, on its thread. It decides and records; ``TierWork`` carries
    the decisions to the workers, and their ``TierAnswer``, one or more steps later, makes the
    results visible.
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
        # told which keys, that the engine cached, a LoRA adapter computed
        self.ledger, self.adapted = ledger, ledger.kept_off_disk.update
        self.step_ended = ledger.costs.step_ended  # told that a step's output arrived
        self._group, self._pool, self._index = group, pool, index
        self.spiller = Spiller(pool, ledger, index.holders, settings.spill_all)
        self.loader = Loader(group, ledger, self.spiller.load_victims)
        self._idle_writer = IdleWriter(pool, group, ledger, self.spiller)
        self.line, self._prefetches = WaitingLine(), settings.prefetch
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
        """Return what a load can bring of a request's tokens; see ``Loader.request_looked_up``."""
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
        """What goes on when all else has left; from now on nothing is decided.

        No request may wait for ever. Jobs under way are followed to their end, so that the blocks
        which they fill return to the pool; a load whose orders were never written is given to the
        workers as one that cannot succeed. Resets are followed for good, since vLLM goes on holding
        blocks back for loads of an engine that was given tiers; none is refused, because nothing is
        offered any more.
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
        """Fail the load that ``request`` waits for and nobody ordered."""
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
        """How many blocks a prefetch would take, after a step's allocations, at most; ``wanted``
        reads which keys the sidecar suggests to bring back, best first.
        """
        self._wake()
        self.idle.stepped()  # first: an order that comes from now on is taken by another step
        return self._prefetcher.offered(wanted()) if self._prefetches else 0

    def spill(self, ranking: EvictionRanking | None, offered: int, step: StepTaken) -> int:
        """Begin to copy what is about to go, after a step's allocations and by the latest advice;
        returns how many blocks can go without a loss.
        """
        self.ledger.costs.step_began(step.tokens)
        loads = self.loader.take_begun()
        taken = max(1 + step.tokens // self._group.block_size, step.evicted - loads)
        return self.spiller.step(ranking, taken, loads, offered, step)

    def fetch(self, tokens: int, offered: int, spare: int) -> TierWork:
        """Begin to write and to bring back what may be, in a step of ``tokens`` tokens; returns
        what the workers shall do.
        """
        self._idle_writer.step()
        if offered:
            self._prefetcher.step(spare)
        self.idle.worked(bool(tokens or self.ledger.book.has_new))
        left = self.spiller.may_pass if self.may_rest and tokens else -1
        if left >= 0 and not (offered or self._idle_writer.is_busy):
            self.rest.begin(left, self.spiller.usual)
        return self.outstanding()  # last: an order that is taken and not returned is lost

    def outstanding(self) -> TierWork:
        """Take the orders that the workers were not given yet."""
        if not (self.ledger.book.has_new or self._broken or self.ledger.directory.voided):
            return _NO_WORK
        voided = self.ledger.directory.voided.take()  # first: nothing may fail once jobs are taken
        broken, self._broken = tuple(self._broken), []
        return TierWork(self.ledger.book.take() + broken, *voided)

    def answered(self, answer: TierAnswer, received: Iterable[str] = ()) -> None:
        """Take what the workers did, and requests whose loads are over."""
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
        """Whether ``changed`` does anything with what the step evicted that ``core`` noted."""
        kept_off, unused = self.ledger.kept_off_disk, self._prefetcher.unused
        return bool((kept_off or unused) and core.evicts(kept_off, unused))

    @property
    def owes(self) -> bool:
        """Whether the engine must go on stepping to learn the end of a job. A write to the disk
        does not count: no request waits for it, and a disk may hang.
        """
        return bool(self._broken or self.ledger.book.pressing)

    def has_pending_push_work(self) -> bool:
        """Whether it must go on stepping for that, or to take an order."""
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
        """Give up what the colder tiers hold; False while a request waits for some of it."""
        self._wake()
        self.ledger.clear()
        self._idle_writer.end()
        self.spiller.look_again()
        return not self.promises.binding

    def copies(self) -> list[AnyEvent]:
        """Return every copy, for the sidecar, from the client's thread."""
        return self.ledger.all_copies()


def _forget_lost(
    kept_off: set[int], pool: BlockPool, hashes: Sequence[bytes], keys: Sequence[int]
) -> None:
    """Forget of evicted blocks those that the pool holds no more. At once: they may be computed
    again.
    """
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
