"""``TraceEvents``: makes the events that an engine's hook would send for a trace."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...graph.types import Authority, Tier
from ...graph.wire.events import (
    BlocksRemoved,
    BlocksSpilled,
    BlocksStored,
    CopiesDropped,
    RequestFinished,
    RequestStarted,
    Segment,
)
from .trace import BYTES_PER_TOKEN, Ints, Trace


class TraceEvents:
    """Makes the events of a trace.

    Args:
        hints: Whether callers name their sessions and state what the trace knows. If the trace has
            no such statements, they state which request is their session's last.
        layers: Whether the engine finds the parts of each prompt itself; replaces callers'
            statements.
        stops: Whether the engine recognises from each answer why it ended; replaces callers'
            statements.
    """

    def __init__(
        self, trace: Trace, hints: bool, layers: bool = False, stops: bool = False
    ) -> None:
        self.keys = trace.keys()
        self._trace = trace
        self._named = hints and trace.has_sessions
        self._said = trace.said if hints and trace.said and trace.said.anything else None
        self._knows_last = hints and self._said is None
        self._read = trace.said if layers and self._said is None else None
        self._ends = self._said or (trace.said if stops else None)

    def started(self, request: int, hit: int) -> RequestStarted:
        trace = self._trace
        chain = trace.chain(request)
        return RequestStarted(
            request_id=str(request),
            hashes=self._packed(chain[: int(trace.prompts[request])]),
            prompt_tokens=int(trace.input_tokens[request]),
            cached_tokens=hit * trace.block_size,
            block_size=trace.block_size,
            session=self._session(request),
            tenant=self._tenant(request),
            segments=self._segments(request),
        )

    def stored(self, request: int, hit: int) -> BlocksStored:
        chain = self._trace.chain(request)
        parent = int(self.keys[chain[hit - 1]]) if hit else None
        return BlocksStored(self._packed(chain[hit:]), parent, self._trace.block_size)

    def removed(self, blocks: Sequence[int]) -> BlocksRemoved:
        return BlocksRemoved(self.keys[list(blocks)].tobytes())

    def copied(self, blocks: Sequence[int]) -> BlocksSpilled:
        size = BYTES_PER_TOKEN * self._trace.block_size
        return BlocksSpilled(self.keys[list(blocks)].tobytes(), Tier.WARM, size)

    def dropped(self, blocks: Sequence[int]) -> CopiesDropped:
        return CopiesDropped(self.keys[list(blocks)].tobytes(), Tier.WARM)

    def finished(self, request: int, now: float) -> RequestFinished:
        trace = self._trace
        prompts, tokens = int(trace.prompts[request]), int(trace.input_tokens[request])
        # A partial block has no hash that a longer prompt could extend.
        known = trace.chain(request)
        whole = np.concatenate([known[: int(trace.full[request])], known[prompts:]])
        return RequestFinished(
            request_id=str(request),
            hashes=self._packed(whole),
            prompt_tokens=tokens,
            total_tokens=tokens + int(trace.output_tokens[request]),
            reason="finished",
            session=self._session(request),
            tenant=self._tenant(request),
            waiting_for_tool=self._waiting(request),
            expected_return_s=self._expected_return_s(request, now),
            session_ended=self._ended(request),
        )

    def _session(self, request: int) -> str | None:
        return f"s{self._trace.session[request]}" if self._named else None

    def _tenant(self, request: int) -> str | None:
        if self._said is None or self._said.tenant[request] < 0:
            return None
        return f"t{self._said.tenant[request]}"

    def _segments(self, request: int) -> tuple[Segment, ...]:
        said = self._said or self._read
        if said is None:
            return ()
        authority = int(Authority.INFERRED if self._said is None else Authority.CALLER)
        return tuple(
            Segment(int(layer), start, end, authority=authority)
            for layer, start, end in said.layers[request]
        )

    def _ended(self, request: int) -> bool:
        if self._said is not None:
            return bool(self._said.ended[request])
        return self._knows_last and bool(self._trace.last[request])

    def _waiting(self, request: int) -> bool | None:
        if self._ends is None or self._ends.waiting[request] < 0:
            return None
        return bool(self._ends.waiting[request])

    def _expected_return_s(self, request: int, now: float) -> float | None:
        """Return the pause from ``now``, or from the recorded end where requests take no time."""
        if self._said is None or np.isnan(told := self._said.expected_return_s[request]):
            return None
        took = np.nan_to_num(self._said.seconds[request])
        return float(told + max(0.0, self._trace.at[request] + took - now))

    def _packed(self, blocks: Ints) -> bytes:
        return self.keys[blocks].tobytes()
