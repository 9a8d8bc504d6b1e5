"""What a request says of its recall, above vLLM's own scheduler."""

from __future__ import annotations

from typing import Any


def used(engine: Any, tokens: list[int], output: int = 1, **fields: Any) -> dict[str, int]:
    """Serve a request alone; what it says of its recall. Empty if it says nothing."""
    told: list[Any] = []
    finished = engine.connector.request_finished_all_groups

    def request_finished(request: Any, block_ids: Any) -> Any:
        answer = finished(request, block_ids)
        told.append(answer[1])
        return answer

    engine.connector.request_finished_all_groups = request_finished
    engine.serve(tokens, output, **fields)
    engine.connector.request_finished_all_groups = finished
    found: dict[str, int] = {} if told[0] is None else told[0]["kvgraph"]["recall"]
    return found
