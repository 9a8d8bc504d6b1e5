"""``FleetRequestRouter``, a ``request_router_class`` for Ray Serve."""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from typing import Any

from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from .board import Speed
from .replica_choice import ReplicaChoice
from .router import OVERLOAD

_SPEED = Speed()

_log = logging.getLogger(__name__)


class FleetRequestRouter(RequestRouter):  # type: ignore[misc]
    """Sends a session's later turns to the replica that has its KV.

    A request's body is its first argument that is a mapping or a pydantic model. Its session is the
    handle's ``session_id``, the one named in the body, or inferred from prompts that extend each
    other. Only Ray knows which replicas are alive; if the chosen one has ``max_ongoing_requests``,
    Ray tries the next.
    """

    def initialize_state(
        self,
        # by how much a home may cost more than the best other replica, in units of the time that
        # the home takes to compute the whole prompt
        overload: float = OVERLOAD,
        # of one replica; it is not measured here
        prefill_tokens_per_s: float = _SPEED.prefill_tokens_per_s,
        pool_tokens: int = 0,  # tokens that a replica's KV pool holds; 0: unknown
    ) -> None:
        speed = Speed(prefill_tokens_per_s=prefill_tokens_per_s, pool_tokens=pool_tokens)
        self.choice = ReplicaChoice(overload, speed)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return every candidate in its own group, the chosen one first."""
        if pending_request is None or not candidate_replicas:
            return [list(candidate_replicas)]
        by_name = {each.replica_id.unique_id: each for each in candidate_replicas}
        try:
            ranked = self._ranked(pending_request, list(by_name))
        except Exception:  # Ray would retry for ever while the caller waits
            _log.exception("no replica was chosen: Ray takes the one with the shortest queue")
            return [list(candidate_replicas)]
        return [[by_name[name]] for name in ranked]

    def on_request_routed(
        self, pending_request: PendingRequest, replica_id: ReplicaID, result: Any
    ) -> None:
        request = pending_request.metadata.internal_request_id
        self.choice.routed(request, replica_id.unique_id, time.monotonic())

    def on_request_completed(self, replica_id: ReplicaID, internal_request_id: str) -> None:
        self.choice.completed(internal_request_id)

    def _ranked(self, pending: PendingRequest, names: list[str]) -> list[str]:
        self.choice.present(names)
        metadata = pending.metadata
        return self.choice.choose(
            metadata.internal_request_id, _body(pending), names, metadata.session_id
        )


def _body(request: PendingRequest) -> Mapping[str, Any]:
    for each in (*request.args, *request.kwargs.values()):
        if isinstance(each, Mapping):
            return each
        if hasattr(each, "model_dump"):
            dumped: dict[str, Any] = each.model_dump(exclude_none=True)
            return dumped
    return {}
