"""What a request says of its recall, above vLLM's own scheduler."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any


@contextlib.contextmanager
def usages(engine: Any) -> Iterator[list[dict[str, int]]]:
    """What requests that end in the block say of their recall; empty of one that says nothing."""
    told: list[dict[str, int]] = []
    finished = engine.connector.request_finished_all_groups

    def request_finished(request: Any, block_ids: Any) -> Any:
        answer = finished(request, block_ids)
        told.append({} if answer[1] is None else answer[1]["kvgraph"]["recall"])
        return answer

    engine.connector.request_finished_all_groups = request_finished
    yield told
    engine.connector.request_finished_all_groups = finished


def used(engine: Any, tokens: list[int], output: int = 1, **fields: Any) -> dict[str, int]:
    """Serve a request alone; what it says of its recall."""
    with usages(engine) as told:
        engine.serve(tokens, output, **fields)
    return told[0]
