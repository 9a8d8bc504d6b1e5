"""How large an engine's pool is: read off its metrics, and what that changes."""

from __future__ import annotations

import pytest
from kvgraph.advisor.fleet.board import EngineBoard
from kvgraph.advisor.fleet.engines import CacheFacts, HealthWatch, cache_facts
from kvgraph.advisor.fleet.upstream import Upstream
from kvgraph_bench.fleet.stand_in_engine import StandInEngine, routed


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
        (said("1000").replace("sliding", 'kv_cache_size_tokens="262144",sliding'), 262_144),
        (said("1000").replace("sliding", 'kv_cache_size_tokens="262144.0",sliding'), 262_144),
        (said("None").replace("sliding", 'kv_cache_size_tokens="500",sliding'), 500),
        (said("74").replace("sliding", 'kv_cache_size_tokens="None",sliding'), 74 * 32),
        (said("74").replace("sliding", 'kv_cache_size_tokens="-1",sliding'), 74 * 32),
        (said("74").replace("sliding", 'kv_cache_size_tokens="inf",sliding'), 74 * 32),
        (
            "".join(
                said("9", n).replace("sliding", f'kv_cache_size_tokens="{n}00",s') for n in (1, 2)
            ),
            300,
        ),
        ("vllm:cache_config_info{block_size=", 0),
        ("vllm:cache_config_info{} 1.0", 0),
        ('vllm:cache_config_info{block_size="16",\t=num_gpu_blocks="9"} 1.0', 0),
        ("not metrics", 0),
        ("", 0),
    ],
)
def test_a_pool_is_as_large_as_the_engine_says(exposition: str, tokens: int) -> None:
    assert cache_facts(exposition).tokens == tokens


@pytest.mark.parametrize("size", ['block_size="None",', 'block_size="auto",', ""])
async def test_an_engine_that_states_no_block_size_is_up_all_the_same(size: str) -> None:
    label = f'vllm:cache_config_info{{{size}kv_cache_size_tokens="4096"}} 1.0\n'
    assert cache_facts(label) == CacheFacts(4096, "")
    engine = StandInEngine()
    engine.metrics = label
    async with routed([engine]) as fleet:
        await fleet.until(True)
        assert fleet.proxy.board.pool.tolist() == [4096]


async def test_an_engine_with_other_blocks_gets_requests_and_is_named() -> None:
    engines = [StandInEngine() for _ in range(3)]
    for engine, line in zip(engines, (said("64"), said("64"), OTHERWISE), strict=True):
        engine.metrics = line
    async with routed(engines) as fleet:
        await fleet.until(True, True, True)
        for number in range(6):
            answer = await fleet.complete(headers={"X-Session-ID": f"s{number}"})
            assert answer.status_code == 200
        told = [each["differs"] for each in (await fleet.client.get("/fleet")).json()["engines"]]
    assert told[:2] == [None, None]
    assert told[2] == (
        "blocks of 16 tokens, xxhash, the others blocks of 32 tokens: they find nothing of "
        "each other's in a store"
    )
    assert engines[2].got


class Told:
    """What sidecars say of how engines hash blocks."""

    def __init__(self, *told: str) -> None:
        self.told = list(told)

    def hashing(self, number: int) -> str:
        return self.told[number]


async def test_an_engine_with_another_seed_is_named_by_its_sidecars_word() -> None:
    board, told = EngineBoard(), Told("", "sha256 1", "sha256 1")
    engines = [StandInEngine() for _ in told.told]
    for engine in engines:
        engine.metrics = said("64")
        await engine.start()
    upstreams = [Upstream(board.add(each.url), each.url, 60.0) for each in engines]
    watch = HealthWatch(board, hashing=told.hashing)
    for last in ("sha256 1", "sha256 2"):
        told.told[2] = last
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


OTHERWISE = said("64").replace('"32"', '"16"').replace("{", '{prefix_caching_hash_algo="xxhash",')


async def test_new_sessions_go_where_they_displace_nothing_though_a_prefix_lies_elsewhere() -> None:
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
