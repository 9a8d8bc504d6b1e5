"""Engines on paper, for tests: a prompt that leaves the pool and comes back."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
from kvgraph_bench.paper.paper_engine import BLOCK_SIZE, PaperEngine


def text(blocks: int, seed: int) -> list[int]:
    """A prompt of ``blocks`` full blocks that are this seed's own, and one token more."""
    return [
        seed % 190,
        seed // 190,
        *((7 * seed + at) % 190 for at in range(blocks * BLOCK_SIZE - 1)),
    ]


def hashes_of(engine: PaperEngine, prompt: list[int], **fields: Any) -> list[bytes]:
    """What vLLM calls a prompt's full blocks."""
    return list(engine.make("probe", prompt, 1, **fields).block_hashes)


def is_cached(engine: PaperEngine, block_hash: bytes) -> bool:
    held = engine.pool.cached_block_hash_to_block
    return held.get_one_block(block_hash + bytes(4)) is not None


def in_pool(engine: PaperEngine, prompt: list[int]) -> int:
    """How many of a prompt's full blocks the pool has cached, wherever they stand in it."""
    return sum(is_cached(engine, each) for each in hashes_of(engine, prompt))


def park(engine: PaperEngine, prompt: list[int], **fields: Any) -> None:
    """Serve ``prompt`` and then others, until its blocks left the pool, copied."""
    engine.serve(prompt, **fields)
    for seed in range(1000, 1000 + engine.shape.blocks // 4):
        engine.serve(text(4, seed))
    hashes = hashes_of(engine, prompt, **fields)
    assert not is_cached(engine, hashes[0]), "the prompt is still in the pool"
    assert all(each in engine.side.bridge.ledger.directory for each in hashes)


def begin_load(engine: PaperEngine, prompt: list[int], output: int = 1, **fields: Any) -> Any:
    """Ask for a parked prompt: its request waits for a load that is not over."""
    from vllm.v1.request import RequestStatus

    request = engine.ask(prompt, output, **fields)
    engine.step()
    assert request.status == RequestStatus.WAITING_FOR_REMOTE_KVS
    return request


def settle_whole(engine: PaperEngine, *asked: tuple[Any, int]) -> None:
    """Run until nothing is left to do: each request has so many tokens of answer, and every block
    is free.
    """
    engine.settle()
    lengths = [len(engine.outputs[request.request_id]) for request, _ in asked]
    assert lengths == [length for _, length in asked]
    assert engine.is_whole()


def fail(*_: Any, **__: Any) -> None:
    raise RuntimeError("an injected fault")


def words(count: int, seed: int) -> list[int]:
    """Text of the seed's own, of tokens that a model on paper knows."""
    return np.random.default_rng(seed).integers(3, 190, count).tolist()  # type: ignore[no-any-return]


def changed(config: Any, part: str, **fields: Any) -> Any:
    """A copy of ``config`` in whose ``part`` some fields are others."""
    made = copy.copy(config)
    setattr(made, part, copy.copy(getattr(config, part)))
    for name, value in fields.items():
        object.__setattr__(getattr(made, part), name, value)
    return made
