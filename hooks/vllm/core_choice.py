"""Chooses between the compiled core and the Python path, when an engine attaches."""

from __future__ import annotations

import logging
import random
import sysconfig
from collections.abc import Callable
from functools import lru_cache
from importlib import import_module
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from ...graph.types import Keys
from ..keys import key_in_pool
from ..link.mailbox import NOBODY
from ..settings import CORE_VARIABLE, PYTHON, engine_settings
from .core_index import CoreIndex, CoreTap
from .free_queue.window import move_behind
from .groups import ObservedGroup
from .index import BlockIndex
from .observer import ChangeReporter
from .tap import PoolTap

if TYPE_CHECKING:
    from vllm.v1.core.block_pool import BlockPool
    from vllm.v1.kv_cache_interface import KVCacheConfig

logger = logging.getLogger(__name__)


def new_index(
    kv_cache: KVCacheConfig, pool: BlockPool, group: ObservedGroup, clock: Callable[[], float]
) -> BlockIndex:
    if reason := reason_against() or _misfit(kv_cache, group):
        logger.info("kvgraph: the hooks run in Python: %s", reason)
    else:
        try:
            return CoreIndex(pool, group, clock)
        except TypeError as error:
            logger.warning("kvgraph: the hooks run in Python: %s", error)
    return BlockIndex(pool, clock, group.scale == 1, hears_only=not group.skips)


def new_tap(pool: BlockPool, group: ObservedGroup, index: BlockIndex) -> PoolTap:
    if isinstance(index, CoreIndex):
        return CoreTap(pool, group.index, index)
    return PoolTap(pool, group.index)


def reason_against() -> str | None:
    """Return why no engine in this environment uses the compiled core; None if suitable ones do."""
    if engine_settings("core").core:
        return f"{CORE_VARIABLE}={PYTHON} asks for it"
    return _reason_in_this_process()


@lru_cache(maxsize=1)
def _reason_in_this_process() -> str | None:
    """As ``reason_against``; a scratch pool is made and tried once."""
    if sysconfig.get_config_var("Py_GIL_DISABLED"):
        return "the compiled core needs a Python with the GIL, and this build is free-threaded"
    try:
        import_module("kvgraph._engine")
    except ImportError as error:
        return f"no compiled core in this installation ({error})"

    try:
        return prove()
    except Exception as error:
        return f"the compiled core failed its proof ({type(error).__name__}: {error})"


def _misfit(kv_cache: KVCacheConfig, group: ObservedGroup) -> str | None:
    if len(kv_cache.kv_cache_groups) != 1 or group.groups_take != 1:
        return "the compiled core follows one KV cache group, and this model has several"
    if group.scale != 1 or group.skips:
        return "the compiled core follows full attention, with one hash a block"
    return None


_BLOCKS: Final = 65
_ROUNDS: Final = 120  # chosen: some 30 ms
_HASH_BYTES: Final = 32
_SEED: Final = 7
_BLOCK_SIZE: Final = 16


def prove(rounds: int = _ROUNDS, seed: int = _SEED) -> str | None:
    """Run ``rounds`` steps of random traffic with both; return the first difference, or None."""
    scratch = _Scratch(random.Random(seed))
    for _ in range(rounds):
        scratch.step()
        if differs := scratch.compare():
            return f"the compiled core differs from the Python path in {differs}"
    return None


class _Scratch:
    """One pool that both follow; requests come, find some of their blocks cached, and go."""

    def __init__(self, rng: random.Random) -> None:
        from vllm.v1.core.block_pool import BlockPool

        self._rng, self._now = rng, 0.0
        self._pool: BlockPool = BlockPool(_BLOCKS, True, _BLOCK_SIZE)
        self._blocks: list[Any] = self._pool.blocks
        group = ObservedGroup(0, _BLOCK_SIZE, _BLOCK_SIZE)
        self._python = BlockIndex(self._pool, self._clock)
        self._tap = PoolTap(self._pool, 0)
        self._tap.attach()
        self._index = CoreIndex(self._pool, group, self._clock)
        self._core = self._index.core
        self._gone: list[int] = []
        self._reporter = ChangeReporter(group, self._python, self._gone.extend)
        note = self._pool._emit_block_removed_events
        self._pool.cache_full_blocks = self._core.cache_full_blocks
        self._pool._emit_block_removed_events = lambda hashes: self._removed(note, hashes)
        self._running: list[tuple[Any, list[Any]]] = []
        self._chains = [
            [rng.randbytes(_HASH_BYTES) for _ in range(rng.randrange(1, 12))] for _ in range(12)
        ]

    def step(self) -> None:
        rng, pool = self._rng, self._pool
        self._now += 1.0
        for _ in range(rng.randrange(4)):
            self._begin(rng.choice(self._chains))
        for entry in rng.sample(self._running, len(self._running) // 2):
            self._end(entry)
        if rng.random() < 0.05:
            pool.evict_blocks({block.block_id for block in rng.sample(self._blocks[1:], 5)})

    def compare(self) -> str | None:
        """Where the two differ now: in events, index, or the queue after a move."""
        theirs = [
            event
            for changes in self._tap.take()
            for event in self._reporter.events(
                [(each[0].block_hashes, *each[1:]) for each in changes.cached],
                changes.evicted, changes.then_reset, (),
            )
        ]  # fmt: skip
        batch = self._core.take({}, False)
        ours = batch.events() if batch is not None else []
        if ours != theirs:
            return "events"
        order = self._order()
        held = self._python.holders(order)
        if not np.array_equal(self._index.holders(order), held):
            return "the index"
        return self._compare_laying(order, held)

    def _compare_laying(self, order: Keys, held: Any) -> str | None:
        core, since = self._core, self._now - self._rng.randrange(4)
        core.keep_first(0)
        core.follow(order, held)
        count = self._rng.randrange(1, 20)
        found = self._python.find_unused(order, since, held)
        chosen = found.blocks[:count]
        queue: Any = self._pool.free_block_queue
        stood = queue.get_all_free_blocks()
        rest = [block for block in stood if block not in chosen]
        cached = [block for block in stood if block.block_hash is not None]
        if not _are(core.scan(None, count, len(stood) + 1)[:3], cached[:count]):
            return "what is looked through"
        core.lay(queue.fake_free_list_head, count, len(order), since)
        if _walk(queue) != (expected := chosen + rest):
            return "the free queue"
        if core.look(count)[0] != chosen or core.drop_taken() != len(chosen):
            return "the victims"
        move_behind(queue.fake_free_list_head, stood)  # as it was, for whatever comes next
        return None if _walk(queue) == stood and expected else "the free queue"

    def _begin(self, hashes: list[bytes]) -> None:
        pool = self._pool
        request = SimpleNamespace(block_hashes=hashes, lora_request=None, mm_features=())
        found: list[Any] = []
        while len(found) < len(hashes) and self._rng.random() < 0.9:  # else computed again
            block = pool.get_cached_block(hashes[len(found)], [0])
            if block is None:
                break
            found += block
        pool.touch(found)
        if (wanted := len(hashes) - len(found)) > pool.get_num_free_blocks():
            pool.free_blocks(reversed(found))
            return
        blocks = [*found, *pool.get_new_blocks(wanted)]
        pool.cache_full_blocks(request, blocks, len(found), len(blocks), _BLOCK_SIZE, 0)
        self._running.append((request, blocks))

    def _end(self, entry: tuple[Any, list[Any]]) -> None:
        ids = [block.block_id for block in entry[1]]
        self._python.freed(ids)
        self._index.freed(ids)
        self._pool.free_blocks(reversed(entry[1]))
        self._running.remove(entry)

    def _order(self) -> Keys:
        """Keys of a ranking: of cached blocks, one that nobody holds, and one twice."""
        keys = [key_in_pool(block.block_hash) for block in self._blocks if block.block_hash]
        self._rng.shuffle(keys)
        return np.array([*keys, 12345, *keys[:1]], dtype=np.uint64)

    def _removed(self, note: Any, hashes: list[bytes]) -> None:
        note(hashes)
        self._core.removed(hashes)

    def _clock(self) -> float:
        return self._now


def _are(found: tuple[list[Any], list[bytes], bytes], blocks: list[Any]) -> bool:
    """Whether these blocks were found, with their hashes and numbers."""
    ids = np.frombuffer(found[2], np.int64).tolist()
    held = [block.block_hash for block in blocks], [block.block_id for block in blocks]
    return found[0] == blocks and (found[1], ids) == held


def _walk(queue: Any) -> list[Any]:
    """The queue's blocks, walked in both directions and counted; else nothing."""
    forwards, backwards = list[Any](), list[Any]()
    block = queue.fake_free_list_head.next_free_block
    while block is not queue.fake_free_list_tail and len(forwards) <= queue.num_free_blocks:
        forwards.append(block)
        block = block.next_free_block
    block = queue.fake_free_list_tail.prev_free_block
    while block is not queue.fake_free_list_head and len(backwards) <= queue.num_free_blocks:
        backwards.append(block)
        block = block.prev_free_block
    same = forwards == backwards[::-1] and len(forwards) == queue.num_free_blocks
    return forwards if same else [NOBODY]
