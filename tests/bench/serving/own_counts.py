"""What vLLM itself counts, from its page of metrics."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

_SOURCES: Final = "vllm:prompt_tokens_by_source_total"
_SERVED: Final = "vllm:request_inference_time_seconds"


@dataclass(frozen=True, slots=True)
class OwnCounts:
    """Since the server's start.

    Attributes:
        sources: Prompt tokens by where they came from.
        served_s: Mean seconds of a request from being scheduled to its last token, by the engine's
            clock; 0 before the first one's end.
    """

    sources: dict[str, float]
    served_s: float


def own_counts(url: str) -> OwnCounts:
    """What the server at ``url`` counted."""
    return parse_counts(httpx.get(f"{url}/metrics", timeout=10.0, trust_env=False).text)


def parse_counts(page: str) -> OwnCounts:
    """What a page of metrics says."""
    samples = [one for family in text_string_to_metric_families(page) for one in family.samples]
    sources = {one.labels["source"]: one.value for one in samples if one.name == _SOURCES}
    seconds = sum(one.value for one in samples if one.name == f"{_SERVED}_sum")
    requests = sum(one.value for one in samples if one.name == f"{_SERVED}_count")
    return OwnCounts(sources, seconds / requests if requests else 0.0)
