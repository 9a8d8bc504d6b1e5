"""How large an engine's pool is: read off its metrics, and what that changes."""

from __future__ import annotations

import pytest
from kvgraph.advisor.fleet.board import EngineBoard
from kvgraph.advisor.fleet.engines import CacheFacts, HealthWatch, cache_facts
from kvgraph.advisor.fleet.upstream import Upstream
from kvgraph_bench.fleet.stand_in_engine import StandInEngine
from stand_ins import all_up, codes, served, status_of


def said(blocks: str, engine: int = 0) -> str:
    return (
        f'vllm:cache_config_info{{block_size="32",cache_dtype="auto",engine="{engine}",'
        f'num_gpu_blocks="{blocks}",sliding_window="None"}} 1.0\n'
    )


def also(line: str, size_tokens: str) -> str:
    """The same, with the size of the pool in tokens, as newer engines state it."""
    return line.replace("sliding", f'kv_cache_size_tokens="{size_tokens}",sliding')


@pytest.mark.parametrize(
    ("exposition", "tokens"),
    [
        ("# HELP vllm:cache_config_info x\n" + said("74") + "vllm:e2e_total 3.0\n", 74 * 32),
        (said("74") + said("74", engine=1), 2 * 74 * 32),
        (said("None"), 0),
        (also(said("1000"), "262144"), 262_144),
        (also(said("1000"), "262144.0"), 262_144),
        (also(said("None"), "500"), 500),
        (also(said("74"), "None"), 74 * 32),
        (also(said("74"), "-1"), 74 * 32),
        (also(said("74"), "inf"), 74 * 32),
        (also(said("9", 1), "100") + also(said("9", 2), "200"), 300),
        ("vllm:cache_config_info{block_size=", 0),
        ("vllm:cache_config_info{} 1.0", 0),
        ('vllm:cache_config_info{block_size="16",\t=num_gpu_blocks="9"} 1.0', 0),
        ("not metrics", 0),
        ("", 0),
    ],
)
def test_a_pool_is_as_large_as_the_engine_says(exposition: str, tokens: int) -> None:
    assert cache_facts(exposition).tokens == tokens


def stating(*metrics: str) -> list[StandInEngine]:
    """Engines that say so of their caches."""
    engines = [StandInEngine() for _ in metrics]
    for engine, each in zip(engines, metrics, strict=True):
        engine.metrics = each
    return engines


@pytest.mark.parametrize("size", ['block_size="None",', 'block_size="auto",', ""])
async def test_an_engine_that_states_no_block_size_is_up_all_the_same(size: str) -> None:
    label = f'vllm:cache_config_info{{{size}kv_cache_size_tokens="4096"}} 1.0\n'
    assert cache_facts(label) == CacheFacts(4096, "")
    async with all_up(*stating(label)) as fleet:
        assert fleet.proxy.board.pool.tolist() == [4096]


async def test_a_pool_that_no_engine_has_is_unknown() -> None:
    async with all_up(*stating(said(str(10**30)))) as fleet:
        assert fleet.proxy.board.pool.tolist() == [0]


OTHERWISE = said("64").replace('"32"', '"16"').replace("{", '{prefix_caching_hash_algo="xxhash",')


async def test_an_engine_with_other_blocks_gets_requests_and_is_named() -> None:
    async with all_up(*stating(said("64"), said("64"), OTHERWISE)) as fleet:
        assert await codes(fleet, 6) == [200] * 6
        told = [each["differs"] for each in await status_of(fleet)]
        assert min(served(fleet)) > 0
    assert told == [
        None, None,
        "blocks of 16 tokens, xxhash, the others blocks of 32 tokens: they find nothing of "
        "each other's in a store",
    ]  # fmt: skip


async def test_an_engine_with_another_seed_is_named_by_its_sidecars_word() -> None:
    board, told = EngineBoard(), ["", "sha256 1", "sha256 1"]
    engines = stating(*[said("64")] * 3)
    for engine in engines:
        await engine.start()
    upstreams = [Upstream(board.add(each.url), each.url, 60.0) for each in engines]
    watch = HealthWatch(board, hashing=lambda number: told[number])
    for last in ("sha256 1", "sha256 2"):
        told[2] = last
        for each in upstreams:
            await watch.check(each)
    for each, engine in zip(upstreams, engines, strict=True):
        await each.close()
        engine.kill()
    assert [watch.differs(each.number) for each in upstreams] == [
        None, None,
        "sha256 2, the others sha256 1: they find nothing of each other's in a store",
    ]  # fmt: skip
    assert board.up.all(), "it gets requests all the same"


async def test_new_sessions_go_where_they_displace_nothing_though_a_prefix_lies_elsewhere() -> None:
    async with all_up(*stating(*[said("64")] * 2)) as fleet:
        assert fleet.proxy.board.pool.tolist() == [64 * 32] * 2
        shared = "the same rules for all " * 80
        for number in range(4):
            await fleet.complete(shared + f"{number} " * 2000, session_id=f"s{number}")
        assert served(fleet) == [2, 2]
