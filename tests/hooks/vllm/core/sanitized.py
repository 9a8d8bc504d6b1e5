"""Runs a core that was built with a sanitizer: the proof, and two threads at once.

vLLM itself is not imported, since its libraries do not run under a sanitizer: its block pool's
place is taken by blocks with the same slots.
"""

from __future__ import annotations

import importlib.util
import os
import random
import sys
import threading
from types import SimpleNamespace
from typing import Any

import numpy as np


class Block:
    """As vLLM's, as far as the core looks."""

    __slots__ = ("_block_hash", "block_id", "next_free_block", "prev_free_block", "ref_cnt")

    def __init__(self, block_id: int) -> None:
        self.block_id, self.ref_cnt = block_id, 0
        self._block_hash: bytes | None = None
        self.prev_free_block: Any = None
        self.next_free_block: Any = None


class Queue:
    def __init__(self, blocks: list[Block]) -> None:
        self.fake_free_list_head, self.fake_free_list_tail = Block(-1), Block(-1)
        self.link(self.fake_free_list_head, self.fake_free_list_tail)
        for block in blocks:
            self.append(block)

    @staticmethod
    def link(one: Block, other: Block) -> None:
        one.next_free_block, other.prev_free_block = other, one

    def append(self, block: Block) -> None:
        self.link(self.fake_free_list_tail.prev_free_block, block)
        self.link(block, self.fake_free_list_tail)

    def take(self) -> Block | None:
        """The next block; None if none is free."""
        block: Block = self.fake_free_list_head.next_free_block
        if block is self.fake_free_list_tail:
            return None
        self.link(self.fake_free_list_head, block.next_free_block)
        block.prev_free_block = block.next_free_block = None
        return block


class Pool:
    """A pool whose blocks are cached, evicted and freed at random."""

    def __init__(self, blocks: int) -> None:
        self.blocks = [Block(number) for number in range(blocks)]
        self.free_block_queue = Queue(self.blocks[1:])

    def cache_full_blocks(
        self, request: Any, blocks: list[Block], num_cached_blocks: int, num_full_blocks: int,
        block_size: int, kv_cache_group_id: int,
    ) -> None:  # fmt: skip
        for at in range(num_cached_blocks, num_full_blocks):
            blocks[at]._block_hash = request.block_hashes[at] + bytes(4)


def engine() -> Any:
    """The module that was built."""
    specification = importlib.util.spec_from_file_location("_engine", os.environ["CORE_FILE"])
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


class Memory:
    """Copies that are begun, used and given up at random."""

    def __init__(self, module: Any, rng: random.Random, chains: list[list[bytes]]) -> None:
        self.copies, self.rng, self.chains = module.Copies(False), rng, chains
        self.begun: list[Any] = []
        self.held: list[Any] = []
        self.last = 0

    def step(self) -> None:
        """One job or two of an engine's."""
        rng, copies, chain = self.rng, self.copies, self.rng.choice(self.chains)
        self.begun += copies.make(chain, self.last + 1, 0, (True,))
        self.last += len(chain)
        rng.shuffle(self.begun)
        copies.complete([self.begun.pop() for _ in range(rng.randrange(len(self.begun)))], 0)
        self.held += filter(None, copies.pinned(rng.choice(self.chains)))
        copies.used(rng.choice(self.chains))
        copies.all_leave(rng.choice(self.chains))
        copies.all_leave_pool([each + bytes(4) for each in chain])
        ids, passed = np.arange(len(chain)), np.zeros(len(chain), dtype=bool)
        keys = list(map(rng_key, chain))
        worth = np.array(keys, dtype=np.uint64)
        worth[:: rng.randrange(1, 4)] = 0
        marks = worth, passed, frozenset(keys[:3]), dict.fromkeys(keys[2:4])
        under_way = dict.fromkeys(keys[:2])
        full = [each + bytes(4) for each in chain]
        copies.lacking(full, ids, rng.choice((None, marks)), under_way, self.last)
        copies.drop(copies.victims(rng.randrange(9), chain))
        copies.unpin([self.held.pop() for _ in range(rng.randrange(1 + len(self.held)))])
        order = copies.order()
        assert copies.hashes_of([rng_key(each) for each in order]) == order
        assert len(copies) == len(order) == copies.run(order)
        assert None not in copies.find_all(order)


def main(steps: int = 1500, blocks: int = 200) -> str:
    """Says whether index and queue are what they must be after random traffic."""
    rng, pool = random.Random(5), Pool(blocks)
    freed = np.full(blocks, -np.inf)
    event = lambda *fields: fields  # noqa: E731
    module, core = engine(), None
    core = module.Core(
        pool, 0, freed, (0, 1, 2, 3, 5), event, event, event, 16, lambda: core.work(True)
    )
    chains = [[rng.randbytes(32) for _ in range(rng.randrange(1, 9))] for _ in range(60)]
    kept: list[Any] = []
    done = threading.Event()
    now, running, sessions = [0.0], dict[str, Any](), dict[str, str]()
    mailbox = SimpleNamespace(_ranking=None, _admission=None)
    memory = Memory(module, rng, chains)
    core.sized(16, 64, 16, 64.0, 0.98)
    core.pace(lambda: now[0], running, sessions, kept.append, mailbox, 2.0, 1, 64, 0.2, 10.0, 1)
    core.watch_holding(SimpleNamespace(rests=True))
    dues = set[int]()

    def client() -> None:
        """Takes rankings in and makes events, beside the steps."""
        while not done.is_set():
            keys = np.array([rng_key(each) for chain in chains for each in chain], dtype=np.uint64)
            core.holders(keys, np.empty(len(keys), dtype=np.int64))
            for _ in range(len(kept)):
                kept.pop(0).events()

    thread = threading.Thread(target=client, daemon=True)  # ends with what failed
    thread.start()
    for step in range(steps):
        request = SimpleNamespace(
            block_hashes=rng.choice(chains),
            request_id=f"r{step}",
            lora_request=None,
            mm_features=(),
        )
        now[0], running[f"r{step}"] = float(step), request
        sessions[f"r{step}"] = "a session"
        core.looked_up(f"r{step}", len(request.block_hashes) + step % 3, 0, step % 2)
        if gone := running.pop(f"r{step - 4}", None):
            core.finished(gone.request_id)
            del sessions[gone.request_id]
        taken = [pool.free_block_queue.take() for _ in request.block_hashes]
        for block in taken:
            if block._block_hash is not None:
                core.removed([block._block_hash])
            block._block_hash, block.ref_cnt = None, 1
        core.cache_full_blocks(request, taken, 0, len(taken), 16, 0)
        for block in reversed(taken):
            block.ref_cnt = 0
            pool.free_block_queue.append(block)
        core.freed([block.block_id for block in taken], len(taken), float(step))
        core.evicts(set(), {rng_key(each) for each in request.block_hashes[:3]})
        if step % 3 and (batch := core.take(sessions, step % 7 == 0)) is not None:
            batch.cached()
            kept.append(batch)
        dues.add(core.step(100 * (step % 2), step % 5, 0))
        held = [block for block in pool.blocks[1:] if block._block_hash is not None]
        rng.shuffle(held)
        order = np.array([rng_key(block._block_hash[:-4]) for block in held], dtype=np.uint64)
        found = np.empty(len(order), dtype=np.int64)
        core.work(True)
        core.holders(order, found)
        core.keep_first(rng.randrange(5))
        core.follow(order, found)
        place = core.anchor(float(step)) or pool.free_block_queue.fake_free_list_head
        core.lay(place, rng.randrange(30), 100, float(step))
        mailbox._ranking = SimpleNamespace(ts=float(step))
        blank = pool.free_block_queue.fake_free_list_head.next_free_block
        core.rest_on(mailbox._ranking, blank if step % 4 == 0 else None, True, step % 3 == 0)
        dues.add(core.step(8, 0, 0))
        core.expect(step % 40, step % 9, 0)
        core.look_ahead(step % 4, 50, 8)
        if step % 50 == 0:
            core.forget_keys(order[:3])
        core.look(rng.randrange(9))
        core.forget([block.block_id for block in rng.sample(held, min(3, len(held)))])
        core.scan(None, 20, 20)
        assert len(core.head(20)[0]) == min(20, blocks - 1)
        memory.step()
        core.add([held[0].block_id], [held[0]._block_hash])
        core.drop_taken()
    assert 0 in dues
    assert len(dues) > 1
    done.set()
    thread.join()
    seen, block = 0, pool.free_block_queue.fake_free_list_head.next_free_block
    while block is not pool.free_block_queue.fake_free_list_tail:
        assert block.next_free_block.prev_free_block is block
        seen, block = seen + 1, block.next_free_block
    return "agrees" if seen == blocks - 1 else f"{seen} of {blocks - 1} blocks are in the queue"


def rng_key(block_hash: bytes) -> int:
    return int.from_bytes(block_hash[-8:], "big")


if __name__ == "__main__":
    sys.stdout.write(main() + "\n")
