"""How large an engine's pool is: read off its metrics, and what that changes."""

from __future__ import annotations

import asyncio

import pytest
from kvgraph.advisor.fleet.proxy.engine_metrics import pool_tokens
from kvgraph.bench.fleet.stand_in_engine import StandInEngine, routed


def said(blocks: str, engine: int = 0) -> str:
    return (
        f'vllm:cache_config_info{{block_size="32",cache_dtype="auto",engine="{engine}",'
        f'num_gpu_blocks="{blocks}",sliding_window="None"}} 1.0\n'
    )


@pytest.mark.parametrize(
    ("exposition", "tokens"),
    [
        ("# HELP vllm:cache_config_info x\n" + said("74") + "vllm:e2e_total 3.0\n", 74 * 32),
        (said("74") + said("74", engine=1), 2 * 74 * 32),
        (said("None"), 0),
        ("vllm:cache_config_info{block_size=", 0),
        ("vllm:cache_config_info{} 1.0", 0),
        ("not metrics", 0),
        ("", 0),
    ],
)
def test_a_pool_is_as_large_as_the_engine_says(exposition: str, tokens: int) -> None:
    assert pool_tokens(exposition) == tokens


def test_new_sessions_go_where_they_displace_nothing_though_a_prefix_lies_elsewhere() -> None:
    async def run() -> None:
        engines = [StandInEngine(), StandInEngine()]
        for engine in engines:
            engine.metrics = said("64")
        async with routed(engines) as fleet:
            await fleet.until(True, True)
            assert fleet.proxy.board.pool.tolist() == [64 * 32] * 2
            shared = "the same rules for all " * 80
            for number in range(4):
                await fleet.complete(shared + f"{number} " * 2000, session_id=f"s{number}")
            assert [len(engine.got) for engine in engines] == [2, 2]

    asyncio.run(run())
