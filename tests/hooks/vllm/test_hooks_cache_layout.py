"""The order of the cache's axes that tiers ask for, as vLLM itself takes the answer."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
from kvgraph.hooks.settings import TierSettings
from kvgraph.hooks.vllm.patches import own_transfer_config

pytestmark = pytest.mark.usefixtures("vllm_loaded")
ENDPOINT = "ipc:///tmp/nobody"
EVERY = ["LBNHC", "LBHNC", "BLHNC"]

Resolve = Callable[..., str]


@pytest.fixture
def resolve(paper_config: Any, monkeypatch: pytest.MonkeyPatch) -> Resolve:
    """vLLM's own choice for an engine on a GPU with our connector, by what its backends read."""
    from vllm.platforms import current_platform
    from vllm.v1.attention.backends.utils import resolve_kv_cache_layout

    monkeypatch.setattr(type(current_platform), "is_cpu", lambda self: False)
    monkeypatch.delenv("VLLM_KV_CACHE_LAYOUT", raising=False)

    def resolved(readable: list[str], tiers: bool = True, **cache: Any) -> str:
        config = copy.copy(paper_config)
        config.cache_config = copy.copy(paper_config.cache_config)
        for name, value in {
            "kv_cache_layout": None,
            "user_specified_block_size": False,
            **cache,
        }.items():
            object.__setattr__(config.cache_config, name, value)
        config.kv_transfer_config = own_transfer_config(
            ENDPOINT, TierSettings(1 << 30) if tiers else None
        )
        layout: str = resolve_kv_cache_layout(config, [readable]).name
        return layout

    return resolved


def test_with_tiers_a_block_is_one_run(resolve: Resolve) -> None:
    assert resolve(EVERY) == "BLHNC"


def test_without_tiers_an_engine_keeps_its_own_order(resolve: Resolve) -> None:
    assert resolve(EVERY, tiers=False) == "LBNHC"


def test_what_the_user_chose_is_kept(resolve: Resolve, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VLLM_KV_CACHE_LAYOUT", "HND")
    assert resolve(EVERY) == "LBHNC"


def test_attention_that_cannot_read_it_keeps_its_own(resolve: Resolve) -> None:
    assert resolve(["LBNHC"]) == "LBNHC"


@pytest.mark.parametrize(
    "cache", [{"user_specified_block_size": True}, {"kv_cache_dtype_skip_layers": ["0"]}]
)
def test_blocks_that_may_have_to_be_split_keep_the_order_that_allows_it(
    resolve: Resolve, cache: dict[str, Any]
) -> None:
    assert resolve(EVERY, **cache) == "LBNHC"


def test_vllm_cannot_split_blocks_in_that_order() -> None:
    """Why it is not always asked for: an engine would end where it runs without us."""
    import torch
    from vllm.v1 import kv_cache_interface as interface
    from vllm.v1.kv_cache_layout import KVCacheLayout

    spec = interface.FullAttentionSpec(
        block_size=128, num_kv_heads=2, head_size=32, dtype=torch.bfloat16
    )
    strides = interface.compute_layout_strides(spec, 4, 3, KVCacheLayout.BLHNC)
    size = spec.page_size_bytes * 4 * 3
    where = interface.KVCacheTensor(
        size=size, layers=["a", "b", "c"], layer_stride=strides[0], block_stride=strides[1]
    )
    raw = torch.zeros(size, dtype=torch.int8)
    with pytest.raises(ValueError, match="cannot be split"):
        interface.create_kv_cache_views(raw, spec, 4, KVCacheLayout.BLHNC, where, 64)


def test_a_cpu_whose_order_is_fixed_is_not_asked(paper_config: Any) -> None:
    from kvgraph.hooks.vllm.connector import KvGraphConnector

    config = copy.copy(paper_config)
    config.kv_transfer_config = own_transfer_config(ENDPOINT, TierSettings(1 << 30))
    assert KvGraphConnector.get_required_kvcache_layout(config) is None


def test_a_configuration_that_is_not_known_raises_nothing() -> None:
    from kvgraph.hooks.vllm.connector import KvGraphConnector

    assert KvGraphConnector.get_required_kvcache_layout(object()) is None
