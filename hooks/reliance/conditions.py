"""Where vLLM asks for what we set in its configuration, and may then run otherwise than stock.

Names and parameters may fit in a release that does something else wherever there is a
``kv_transfer_config``. So each place that reads it was looked at, in the releases that were
compared; a place that is new is named before anybody meets it in an engine.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path
from typing import Final

SET: Final = "kv_transfer_config"
"""The one value of vLLM's configuration that we set. Its connector is ours, and it has no role
unless there are tiers, so that only what asks whether it is there at all sees a difference."""
_NOT_LOOKED_AT: Final = "distributed/kv_transfer/"  # the connectors themselves

KNOWN: Final = frozenset(
    {
        "config/kv_transfer.py:hisparse_host_pool_gib",
        "config/vllm.py:VllmConfig",
        "config/vllm.py:VllmConfig.__post_init__",
        "config/vllm.py:VllmConfig._post_init_kv_transfer_config",
        "config/vllm.py:VllmConfig._resolve_mm_embedding_inputs",
        "config/vllm.py:VllmConfig._verify_aux_output_compatibility",
        "config/vllm.py:VllmConfig._verify_kv_transfer_compat",
        "config/vllm.py:VllmConfig.adjust_dcp_kv_cache_interleave_size",
        "config/vllm.py:VllmConfig.compute_hash",
        "config/vllm.py:VllmConfig.num_hash_lookahead_tokens",
        "config/vllm.py:VllmConfig.validate_block_size",
        "config/vllm.py:VllmConfig.validate_mamba_cached_kernel",
        "engine/arg_utils.py:EngineArgs",
        "engine/arg_utils.py:EngineArgs.add_cli_args",
        "engine/arg_utils.py:EngineArgs.create_engine_config",
        "entrypoints/generate/base/serving.py:GenerateBaseServing.__init__",
        "entrypoints/llm.py:LLM.__init__",
        "models/deepseek_v4/amd/rocm.py:DeepseekV4ROCMAiterMLAAttention.__init__",
        "models/deepseek_v4/amd/rocm.py:DeepseekV4ROCMAiterSparseSWAMetadataBuilder.__init__",
        "models/deepseek_v41/amd/rocm.py:DeepseekV41ROCMAiterMLAAttention.__init__",
        "models/deepseek_v41/amd/rocm.py:DeepseekV41ROCMAiterSparseSWAMetadataBuilder.__init__",
        "models/deepseek_v41/amd/rocm.py:DeepseekV4ROCMAiterSparseSWAMetadataBuilder.__init__",
        "models/deepseek_v41/nvidia/model.py:DeepseekV4Model.__init__",
        "models/deepseek_v41/nvidia/specialized_decode/__init__.py:unsupported",
        "models/kimi_k3/amd/specialized_decode/runtime/__init__.py:unsupported",
        "models/minimax_m3/amd/specialized_decode/runtime/spec.py:DecodeConfig.refusal_reasons",
        "models/step5/nvidia/model.py:_verify_step5_dsa_kv_transfer_compatibility",
        "platforms/cpu.py:CpuPlatform.check_and_update_config",
        "platforms/xpu.py:XPUPlatform.check_and_update_config",
        "utils/ompmultiprocessing.py:OMPProcessManager.__init__",
        "v1/attention/backends/rocm_aiter_unified_attn.py:_kv_connector_enabled",
        "v1/attention/selector.py:get_attn_backend",
        "v1/core/kv_cache_utils.py:resolve_kv_cache_block_sizes",
        "v1/core/sched/scheduler.py:Scheduler.__init__",
        "v1/core/sched/scheduler.py:Scheduler._connector_finished",
        "v1/engine/core.py:EngineCore._initialize_kv_caches",
        "v1/engine/core.py:EngineCoreProc.run_engine_core",
        "v1/engine/utils.py:_apply_dp_identity_suffix",
        "v1/executor/ray_executor.py:RayDistributedExecutor._init_executor",
        "v1/hisparse/layout.py:get_hisparse_host_pool_bytes",
        "v1/metrics/loggers.py:LoggingStatLogger.__init__",
        "v1/metrics/loggers.py:PrometheusStatLogger.__init__",
        "v1/utils.py:report_usage_stats",
        "v1/worker/worker_base.py:WorkerBase.__init__",
    }
)
"""Places that read it in the releases that were compared. What of them is not as in stock vLLM is
declined before the start (``shapes.reason_to_decline``), set right (``plugin.keep_cpu_threads``),
or said in docs/engines.md."""


def unknown_places(package: Path) -> list[str]:
    """Places of a vLLM's sources that read ``SET`` and were not looked at, sorted.

    Whoever reads the value may ask about it under any name, so a function counts that mentions it.

    Args:
        package: The folder ``vllm``.
    """
    return sorted(set(_places(package)) - KNOWN)


def _places(package: Path) -> Iterator[str]:
    for path in package.rglob("*.py"):
        name = path.relative_to(package).as_posix()
        if name.startswith(_NOT_LOOKED_AT):
            continue
        source = path.read_text("utf-8", "replace")
        if SET not in source:
            continue
        try:
            tree = ast.parse(source)
        except SyntaxError:
            yield f"{name}:?"
            continue
        for owner in _readers(tree, ()):
            yield f"{name}:{'.'.join(owner)}"


def _readers(node: ast.AST, inside: tuple[str, ...]) -> Iterator[tuple[str, ...]]:
    """The functions and classes, with those around them, in which the value is mentioned."""
    for child in ast.iter_child_nodes(node):
        named = isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        owner = (*inside, child.name) if named else inside  # type: ignore[attr-defined]
        if SET in (getattr(child, "attr", ""), getattr(child, "id", ""), _constant(child)):
            yield owner
        yield from _readers(child, owner)


def _constant(node: ast.AST) -> object:
    """A string, as in ``getattr(config, "…")``; None for all else."""
    value = node.value if isinstance(node, ast.Constant) else None
    return value if isinstance(value, str) else None
