"""What a request says of its recall, above vLLM's own scheduler."""

from __future__ import annotations

from typing import Any


def used(engine: Any, tokens: list[int], output: int = 1, **fields: Any) -> dict[str, int]:
    """Serve a request alone; what it says of its recall. Empty if it says nothing."""
    told: list[Any] = []
    recall = engine.side.bridge.recall
    finished = recall.request_finished

    def request_finished(request_id: str) -> Any:
        told.append(finished(request_id))
        return told[-1]

    recall.request_finished = request_finished
    engine.serve(tokens, output, **fields)
    recall.request_finished = finished
    found: dict[str, int] = {} if told[0] is None else told[0]["kvgraph"]["recall"]
    return found
