"""Which engines get advice and which of them can have tiers; each refusal is a sentence."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Final

from ..settings import CONNECTOR
from .relied_on import Part
from .versions import WHAT_FITS, live_misfits

if TYPE_CHECKING:
    from vllm.config import VllmConfig
    from vllm.v1.kv_cache_interface import KVCacheConfig, KVCacheSpec

_NO_CONNECTOR: Final = "DeepseekV41"
_ITEM_BYTES: Final = {"float32": 4, "float": 4, "half": 2, "float16": 2, "bfloat16": 2}
"""Bytes per number for vLLM's names of cache types; all other types take one byte or less."""


def reason_to_decline(config: VllmConfig) -> str | None:
    """Return why kvgraph can do nothing in this engine; None if it can."""
    if problems := live_misfits():
        return f"this vLLM is not one that we know: {'; '.join(problems)} ({WHAT_FITS})"
    if not config.cache_config.enable_prefix_caching:
        return "prefix caching is off, so no block outlives its request"
    if config.model_config.is_attention_free:
        return "no layer of this model attends to what came before it; supported: full attention"
    if config.model_config.is_encoder_decoder:
        return "vLLM allows encoder-decoder models no KV connector"
    if config.parallel_config.distributed_executor_backend == "external_launcher":
        return (
            "with an external launcher each rank has a scheduler, and all must decide alike; "
            "advice does not reach them at the same moment"
        )
    user = config.kv_transfer_config
    if user is not None and user.has_connector("HiSparseConnector"):
        return "HiSparse keeps its blocks in several pools; one is supported"
    return _reason_without_connector(config) if user is None else None


def _reason_without_connector(config: VllmConfig) -> str | None:
    """What this engine does only without a connector, or None; see ``relied_on.KNOWN``."""
    if ahead := getattr(config, "num_hash_lookahead_tokens", 0):
        return (
            f"blocks are hashed with {ahead} tokens behind them for the draft model, and this vLLM "
            "drops that, and the last block of each hit, where there is a KV connector"
        )
    if config.parallel_config.prefill_context_parallel_size > 1 and any(
        each.startswith(_NO_CONNECTOR) for each in config.model_config.architectures
    ):
        return f"{_NO_CONNECTOR} with prefill context parallelism does not start with a connector"
    extra = config.additional_config
    backend = extra.get("decode_backend", "auto") if isinstance(extra, dict) else "auto"
    if backend != "auto":
        return f"decode_backend={backend!r} does not start with a connector; supported: auto"
    return None


def reason_for_no_tiers(config: VllmConfig) -> str | None:
    """Return why an engine's configuration allows no tiers; None if it may."""
    from vllm import envs

    if problems := live_misfits(Part.TIERS):
        return f"this vLLM is not one whose blocks we can copy: {'; '.join(problems)} ({WHAT_FITS})"
    model, parallel, user = config.model_config, config.parallel_config, config.kv_transfer_config
    if user is not None and user.kv_connector is not None:
        return f"this engine has {user.kv_connector}, which moves its KV already"
    if model.is_hybrid:
        return "a hybrid model has several kinds of KV cache; supported: full attention alone"
    if parallel.decode_context_parallel_size > 1 or parallel.prefill_context_parallel_size > 1:
        return "context parallelism splits blocks between workers"
    if model.enable_sleep_mode and not envs.VLLM_ENABLE_V1_MULTIPROCESSING:
        return (
            "an engine that sleeps inside of the caller's process "
            "(VLLM_ENABLE_V1_MULTIPROCESSING=0) takes its memory away while it is copied from"
        )
    if envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION:
        # vLLM knows such a request until its load is over, and ends with an error if it is asked
        # to serve another of that id.
        return (
            "with VLLM_DISABLE_REQUEST_ID_RANDOMIZATION=1 a client may use the id of a request "
            "again that it aborted, while a load still fills that one's blocks"
        )
    return None


def reason_for_no_samples(config: VllmConfig) -> str | None:
    """Return why an engine's configuration allows no sampled steps; None if it may."""
    from vllm.platforms import current_platform

    if problems := live_misfits(Part.SAMPLING):
        return "; ".join(problems)
    parallel, user = config.parallel_config, config.kv_transfer_config
    on_cpu = current_platform.is_cpu()
    if user is not None and user.kv_connector not in (None, CONNECTOR):
        return f"samples travel through our connector, and this engine has {user.kv_connector}"
    if not on_cpu and not current_platform.is_cuda():
        return "what reads attention is written for CPUs and for CUDA"
    if parallel.world_size != 1:
        return "an engine with several workers shows each of them a part of its heads or layers"
    if parallel.data_parallel_size != 1 and not on_cpu:
        return "data-parallel ranks run the same CUDA graph, and a sampled step runs none"
    if config.speculative_config is not None:
        return "speculative tokens have several rows of logits per request"
    if config.model_config.use_mla:
        return "MLA keeps one latent vector for all heads, and attention is measured by head"
    return None


def is_full_attention(spec: KVCacheSpec) -> bool:
    from vllm.v1.kv_cache_interface import FullAttentionSpec, UniformTypeKVCacheSpecs

    if isinstance(spec, UniformTypeKVCacheSpecs):
        return all(is_full_attention(each) for each in spec.kv_cache_specs.values())
    return isinstance(spec, FullAttentionSpec)


def reason_to_leave_alone(kv_cache: KVCacheConfig) -> str | None:
    """Return why an engine with these groups of layers gets no advice; None if it does.

    Rankings evict chains from their ends. If no group has full attention, a match needs a chain's
    end and not its beginning, so that order would cost hits.
    """
    if any(is_full_attention(group.kv_cache_spec) for group in kv_cache.kv_cache_groups):
        return None
    kinds = {type(group.kv_cache_spec).__name__ for group in kv_cache.kv_cache_groups}
    return (
        f"no layer of this model attends to everything before it ({', '.join(sorted(kinds))}); "
        "supported: full attention, alone or beside others"
    )


def sizing(config: VllmConfig) -> str:
    """Describe in words what a pool, host memory or a shared store can hold."""
    token, longest = _bytes_per_token(config), config.model_config.max_model_len
    return (
        f"one token's KV takes {token:,} B per worker, so that a GiB holds {2**30 // token:,} "
        f"tokens, and a context of {longest:,} takes {token * longest / 2**30:.2g} GiB "
        "(`kvgraph plan TRACE` says how much a trace needs)"
    )


def _bytes_per_token(config: VllmConfig) -> int:
    """Of KV, on one worker, where every layer keeps all of it."""
    model, parallel = config.model_config, config.parallel_config
    kind = config.cache_config.cache_dtype
    item = model.dtype.itemsize if kind == "auto" else _ITEM_BYTES.get(kind, 1)
    parts = 1 if model.use_mla else 2 * model.get_num_kv_heads(parallel)
    return int(parts * model.get_head_size() * model.get_num_layers(parallel) * item)


def engine_config(arguments: Sequence[str]) -> VllmConfig:
    """Return vLLM's configuration for an engine started with these ``vllm serve`` arguments.

    Nothing of ours is attached to it. Raises SystemExit if vLLM's own parser refuses them, else
    whatever vLLM raises, for example for a model that it cannot find.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    named = bool(arguments) and arguments[0].startswith("-")
    words = list(arguments) if named else ["--model", *arguments]
    parser = EngineArgs.add_cli_args(FlexibleArgumentParser())
    engine = EngineArgs.from_cli_args(parser.parse_args(words))
    create = type(engine).create_engine_config
    config: VllmConfig = getattr(create, "__wrapped__", create)(engine)
    return config
