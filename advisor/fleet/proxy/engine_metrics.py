"""What an engine's own metrics say that costs depend on."""

from __future__ import annotations

import contextlib
from typing import Final, NamedTuple

from prometheus_client.parser import text_string_to_metric_families

_CACHE: Final = "vllm:cache_config_info"
_STATED: Final = "kv_cache_size_tokens"  # vLLM's own word
_LONGEST_NAME: Final = 40  # characters; chosen
_MOST: Final = 1 << 53  # tokens; chosen: beyond any pool


class CacheFacts(NamedTuple):
    """What an engine says of its KV cache.

    Attributes:
        tokens: That its pool holds, its ranks' together; 0 where it does not say.
        hashing: By what its blocks are told apart, in words; empty where it does not say.
    """

    tokens: int = 0
    hashing: str = ""


def cache_facts(exposition: str) -> CacheFacts:
    """What an engine answers at ``/metrics`` about its KV cache."""
    lines = [line for line in exposition.splitlines() if line.startswith(_CACHE + "{")]
    try:
        families = list(text_string_to_metric_families("\n".join(lines) + "\n"))
        ranks = [sample.labels for family in families for sample in family.samples]
        tokens = sum(map(_tokens, ranks))
    except (ValueError, KeyError, OverflowError):
        return CacheFacts()
    if not ranks or not 0 <= tokens <= _MOST:
        return CacheFacts()
    algorithm = ranks[0].get("prefix_caching_hash_algo", "")[:_LONGEST_NAME]
    hashing = f"blocks of {int(ranks[0]['block_size'])} tokens" + f", {algorithm}" * bool(algorithm)
    return CacheFacts(tokens, hashing)


def _tokens(rank: dict[str, str]) -> int:
    """Tokens that a rank's pool holds; raises KeyError or ValueError where it does not say."""
    # Of several groups a request takes blocks of each: the product is too little then, or too much.
    with contextlib.suppress(ValueError, OverflowError):
        if 0 < (stated := int(float(rank.get(_STATED, "")))) <= _MOST:
            return stated
    return int(rank["num_gpu_blocks"]) * int(rank["block_size"])
