"""Following a pool: another vLLM's calls pass unharmed, and a failure leaves nothing behind."""

from __future__ import annotations

from collections import UserList
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from kvgraph.hooks.settings import CORE_VARIABLE
from kvgraph.hooks.vllm import connector as connector_module
from kvgraph.hooks.vllm import scheduler
from kvgraph.hooks.vllm.tap import PoolTap
from kvgraph_bench.hotpath import BLOCK_SIZE, connected, new_pool, request_maker
from paper import fail
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.block_pool import BlockPool
from vllm.v1.kv_cache_interface import FullAttentionSpec

pytestmark = pytest.mark.usefixtures("vllm_loaded")


def with_one_more(original: Callable[..., None]) -> Callable[..., None]:
    """A later vLLM's ``cache_full_blocks``."""

    def cache_full_blocks(
        self: Any, request: Any, blocks: Any, num_cached_blocks: int, num_full_blocks: int,
        block_size: int, kv_cache_group_id: int, block_mask: Any = None, *, tier: str = "hot",
    ) -> None:  # fmt: skip
        original(
            self, request, blocks, num_cached_blocks, num_full_blocks, block_size,
            kv_cache_group_id, block_mask,
        )  # fmt: skip

    return cache_full_blocks


def without_mask(original: Callable[..., None]) -> Callable[..., None]:
    """An earlier vLLM's."""

    def cache_full_blocks(
        self: Any, request: Any, blocks: Any, num_cached_blocks: int, num_full_blocks: int,
        block_size: int, kv_cache_group_id: int,
    ) -> None:  # fmt: skip
        original(
            self, request, blocks, num_cached_blocks, num_full_blocks, block_size, kv_cache_group_id
        )

    return cache_full_blocks


@pytest.mark.parametrize("core", ["python", ""])
@pytest.mark.parametrize(
    ("other", "extra"), [(with_one_more, {"tier": "hot"}), (without_mask, {})], ids=["more", "less"]
)
def test_another_vllm_allocates_as_it_does_without_us(
    other: Any, extra: dict[str, Any], core: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CORE_VARIABLE, core)
    monkeypatch.setattr(BlockPool, "cache_full_blocks", other(BlockPool.cache_full_blocks))
    pool = new_pool(16)
    connector = connected(pool)
    request = request_maker()(list(range(4 * BLOCK_SIZE)))
    blocks = pool.get_new_blocks(4)
    pool.cache_full_blocks(
        request=request, blocks=blocks, num_cached_blocks=0, num_full_blocks=3,
        block_size=BLOCK_SIZE, kv_cache_group_id=0, **extra,
    )  # fmt: skip
    pool.cache_full_blocks(request, blocks, 3, 4, BLOCK_SIZE, 0)
    assert all(block.block_hash is not None for block in blocks)
    (changes,) = connector.side.tap.take()
    assert changes.cached == [(request, blocks, 0, 3), (request, blocks, 3, 4)]


class Strange(int):
    """A group's number that vLLM can use, and that is not to be compared."""

    __hash__ = int.__hash__

    def __eq__(self, other: object) -> bool:
        fail()
        return True


@pytest.mark.parametrize("core", ["python", ""])
def test_what_cannot_be_noted_disables_us_and_not_the_allocation(
    core: str, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CORE_VARIABLE, core)
    pool = new_pool(16)
    connector = connected(pool)
    request = request_maker()(list(range(2 * BLOCK_SIZE)))
    blocks = UserList(pool.get_new_blocks(2))  # which the compiled core does not read
    pool.cache_full_blocks(request, blocks, 0, 2, BLOCK_SIZE, Strange(0))
    assert blocks[1].block_hash is not None
    connector.build_connector_meta(SimpleNamespace(total_num_scheduled_tokens=1))
    assert connector.side is None
    assert "cache_full_blocks" not in vars(pool)
    assert "disabled after RuntimeError" in caplog.text


def test_a_pool_that_lacks_what_is_read_is_not_followed() -> None:
    pool = new_pool(16)
    pool.cache_full_blocks = lambda request, blocks: None
    tap = PoolTap(pool, 0)
    with pytest.raises(TypeError, match="num_cached_blocks"):
        tap.attach()
    assert "reset_prefix_cache" not in vars(pool)


@pytest.mark.parametrize("tells", [True, False])
def test_evictions_are_noted_whether_or_not_vllm_tells_of_them(tells: bool) -> None:
    pool = BlockPool(16, True, BLOCK_SIZE, enable_kv_cache_events=tells)
    tap = PoolTap(pool, 0)
    tap.attach()
    request = request_maker()(list(range(12 * BLOCK_SIZE)))
    blocks = pool.get_new_blocks(12)
    pool.cache_full_blocks(request, blocks, 0, 12, BLOCK_SIZE, 0)
    pool.free_blocks(blocks)
    hashes = [block.block_hash for block in blocks]
    pool.get_new_blocks(8)  # of which three are blank
    (changes,) = tap.take()
    assert list(changes.evicted) == hashes[:5]
    told = [event for event in pool.take_events() if type(event).__name__ == "BlockRemoved"]
    assert len(told) == (5 if tells else 0)
    tap.detach()
    pool.get_new_blocks(2)
    assert not tap.take()


def test_a_vllm_that_tells_of_evictions_by_name_is_followed_too() -> None:
    """Where it tells nobody, a method of Python's own stands in, and takes no argument by name."""

    class Later(BlockPool):  # type: ignore[misc]
        def tell(self, hashes: list[bytes]) -> None:
            self._emit_block_removed_events(block_hashes=hashes)

    pool = Later(16, True, BLOCK_SIZE)
    tap = PoolTap(pool, 0)
    tap.attach()
    pool.tell([b"gone"])
    (changes,) = tap.take()
    assert list(changes.evicted) == [b"gone"]


@pytest.mark.parametrize(
    "part", ["new_index", "FreeQueueArranger", "AdvisorClient", "EngineObserver"]
)
def test_a_failure_while_binding_leaves_the_pool_alone(
    part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    module = connector_module if part == "AdvisorClient" else scheduler
    monkeypatch.setattr(module, part, fail)
    config = SimpleNamespace(
        kv_transfer_config=KVTransferConfig(
            kv_connector="KvGraphConnector", kv_role="kv_both",
            kv_connector_extra_config={"kvgraph_endpoint": "ipc:///nowhere"},
        ),
        scheduler_config=SimpleNamespace(max_num_batched_tokens=64, max_num_seqs=4, policy="fcfs"),
    )  # fmt: skip
    spec = FullAttentionSpec(
        block_size=BLOCK_SIZE, num_kv_heads=1, head_size=8, dtype=torch.float32
    )
    kv_cache = SimpleNamespace(kv_cache_groups=[SimpleNamespace(kv_cache_spec=spec)])
    role = KVConnectorRole.SCHEDULER
    connector = connector_module.KvGraphConnector(config, role, kv_cache)
    pool = new_pool(16)
    before = set(vars(pool))
    connector.bind_gpu_block_pool(pool)
    assert "disabled after RuntimeError in bind_gpu_block_pool" in caplog.text, "it was tried"
    assert connector.side is None
    assert set(vars(pool)) == before
