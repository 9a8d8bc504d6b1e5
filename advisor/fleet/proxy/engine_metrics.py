"""What an engine's own metrics say that costs depend on."""

from __future__ import annotations

from typing import Final

from prometheus_client.parser import text_string_to_metric_families

_CACHE: Final = "vllm:cache_config_info"
_MOST: Final = 1 << 53  # tokens; chosen: beyond any pool


def pool_tokens(exposition: str) -> int:
    """Tokens that an engine's KV pool holds, its ranks' together; 0 where it does not say.

    Args:
        exposition: What it answers at ``/metrics``.
    """
    lines = [line for line in exposition.splitlines() if line.startswith(_CACHE + "{")]
    try:
        families = list(text_string_to_metric_families("\n".join(lines) + "\n"))
        tokens = sum(
            int(sample.labels["num_gpu_blocks"]) * int(sample.labels["block_size"])
            for family in families
            for sample in family.samples
        )
    except (ValueError, KeyError):
        return 0
    return tokens if 0 <= tokens <= _MOST else 0
