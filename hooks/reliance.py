"""Everything of vLLM's that the hooks rely on, so that a version that lacks it is told in words."""

from __future__ import annotations

import importlib
import inspect
from typing import Any, Final

_CACHED: Final = (
    "request", "blocks", "num_cached_blocks", "num_full_blocks", "block_size",
    "kv_cache_group_id",
)  # fmt: skip
_ALLOCATED: Final = ("request", "blocks", "num_external_tokens")
_INSERTED: Final = ("block_hash_with_group_id", "block", "num_tokens")
_BASE: Final = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_SCHEDULER: Final = "vllm.v1.core.sched.scheduler"
_QUEUE: Final = "vllm.v1.core.sched.request_queue"
_FACTORY: Final = "vllm.distributed.kv_transfer.kv_connector.factory"
# module, attribute path, parameters that we pass or are passed
HOOKS: Final = (
    ("vllm.engine.arg_utils", "EngineArgs.create_engine_config", ()),
    ("vllm.config", "KVTransferConfig.is_kv_transfer_instance", ()),
    ("vllm.v1.executor.abstract", "Executor.init_kv_output_aggregator", ("connector",)),
    (_FACTORY, "KVConnectorFactory.create_connector", ()),
    ("vllm.v1.core.block_pool", "BlockPool.cache_full_blocks", _CACHED),
    ("vllm.v1.core.block_pool", "BlockPool._emit_block_removed_events", ("block_hashes",)),
    ("vllm.v1.core.block_pool", "BlockPool.reset_prefix_cache", ()),
    ("vllm.v1.core.block_pool", "BlockHashToBlockMap.get_one_block", ("key",)),
    ("vllm.v1.core.kv_cache_utils", "FreeKVCacheBlockQueue.popleft_n", ("n",)),
    ("vllm.v1.core.kv_cache_utils", "FreeKVCacheBlockQueue.remove", ("block",)),
    ("vllm.v1.core.kv_cache_utils", "FreeKVCacheBlockQueue.prepend_n", ("blocks",)),
    ("vllm.v1.core.kv_cache_utils", "FreeKVCacheBlockQueue.append_n", ("blocks",)),
    ("vllm.v1.core.kv_cache_utils", "FreeKVCacheBlockQueue.iter_blocks_after", ("cursor",)),
    ("vllm.v1.core.kv_cache_utils", "KVCacheBlock.block_hash", ()),
    (_BASE, "KVConnectorBase_V1.bind_kv_cache_manager", ("kv_cache_manager",)),
    (_BASE, "KVConnectorBase_V1.bind_gpu_block_pool", ("gpu_block_pool",)),
    (_BASE, "KVConnectorBase_V1.on_new_request", ("request",)),
    (_BASE, "KVConnectorBase_V1.get_num_new_matched_tokens", ("request", "num_computed_tokens")),
    (_BASE, "KVConnectorBase_V1.update_state_after_alloc", _ALLOCATED),
    (_BASE, "KVConnectorBase_V1.build_connector_meta", ("scheduler_output",)),
    (_BASE, "KVConnectorBase_V1.request_finished", ("request", "block_ids")),
    (_BASE, "SupportsHMA.request_finished_all_groups", ("request", "block_ids")),
    # with admission
    (_SCHEDULER, "Scheduler.add_request", ("request",)),
    (_SCHEDULER, "Scheduler._enqueue_waiting_request", ("request",)),
    (_QUEUE, "RequestQueue.add_request", ("request",)),
    (_QUEUE, "RequestQueue.prepend_request", ("request",)),
    (_QUEUE, "RequestQueue.prepend_requests", ("requests",)),
    (_QUEUE, "RequestQueue.remove_request", ("request",)),
    (_QUEUE, "RequestQueue.remove_requests", ("requests",)),
    (_QUEUE, "RequestQueue.peek_request", ()),
    (_QUEUE, "RequestQueue.pop_request", ()),
    # with tiers
    ("vllm.v1.core.block_pool", "BlockPool.get_new_blocks", ("num_blocks",)),
    ("vllm.v1.core.block_pool", "BlockPool.free_blocks", ("ordered_blocks",)),
    ("vllm.v1.core.block_pool", "BlockPool._insert_block_hash", _INSERTED),
    (_BASE, "KVConnectorBase_V1.register_kv_caches", ("kv_caches",)),
    (_BASE, "KVConnectorBase_V1.start_load_kv", ("forward_context",)),
    (_BASE, "KVConnectorBase_V1.get_finished", ("finished_req_ids",)),
    (_BASE, "KVConnectorBase_V1.get_block_ids_with_load_errors", ()),
    (_BASE, "KVConnectorBase_V1.build_connector_worker_meta", ()),
    (_BASE, "KVConnectorBase_V1.update_connector_output", ("connector_output",)),
    (_BASE, "KVConnectorBase_V1.has_pending_push_work", ()),
    (_BASE, "KVConnectorWorkerMetadata.aggregate", ("other",)),
    ("vllm.v1.core.kv_cache_manager", "KVCacheBlocks.get_block_ids", ()),
)


def misfits() -> list[str]:
    """What this vLLM lacks of ``HOOKS``, or asks of them beyond what we know; in words."""
    return [problem for hook in HOOKS if (problem := misfit(*hook))]


def misfit(module: str, path: str, parameters: tuple[str, ...]) -> str | None:
    """What is wrong with one entry of ``HOOKS``; None if nothing is."""
    found: Any = importlib.import_module(module)
    for part in path.split("."):
        found = getattr(found, part, None)
        if found is None:
            return f"{module}.{path} is missing"
    if not parameters:
        return None
    known = inspect.signature(found).parameters
    if lost := [name for name in parameters if name not in known]:
        return f"{module}.{path} takes no {', '.join(lost)}"
    if new := [name for name in known if name not in parameters and _required(known[name])]:
        return f"{module}.{path} wants {', '.join(new)}"
    return None


def _required(parameter: inspect.Parameter) -> bool:
    optional = parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD)
    return parameter.name != "self" and parameter.default is parameter.empty and not optional
