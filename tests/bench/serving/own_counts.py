"""What vLLM itself counts, from its page of metrics."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

import httpx
from prometheus_client.parser import text_string_to_metric_families

from ..errors import ServerError

_SOURCES: Final = "vllm:prompt_tokens_by_source_total"
_SERVED: Final = "vllm:request_inference_time_seconds"


@dataclass(frozen=True, slots=True)
class OwnCounts:
    """Since the server's start.

    Attributes:
        sources: Prompt tokens by where they came from.
        mean_served_s: Seconds of a request from being scheduled to its last token, by the engine's
            clock; NaN before the first one's end.
    """

    sources: dict[str, float]
    mean_served_s: float


def own_counts(url: str) -> OwnCounts:
    """What the server of one engine at ``url`` counted; raises as ``parse_counts``."""
    return parse_counts(httpx.get(f"{url}/metrics", timeout=10.0, trust_env=False).text)


def parse_counts(page: str) -> OwnCounts:
    """What a page of metrics says.

    Raises:
        ServerError: It does not have what we read: another version of vLLM names it otherwise.
    """
    samples = [one for family in text_string_to_metric_families(page) for one in family.samples]
    by_name = {one.name: one.value for one in samples}
    if missing := {_SOURCES, f"{_SERVED}_sum", f"{_SERVED}_count"} - by_name.keys():
        raise ServerError(f"vLLM's page of metrics has no {', '.join(sorted(missing))}")
    sources = {one.labels["source"]: one.value for one in samples if one.name == _SOURCES}
    requests = by_name[f"{_SERVED}_count"]
    return OwnCounts(sources, by_name[f"{_SERVED}_sum"] / requests if requests else math.nan)
