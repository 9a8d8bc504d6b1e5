"""``Trace``: the requests of a trace in columns, and the blocks that they ask for."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from itertools import pairwise
from typing import Final

import numpy as np
import numpy.typing as npt

from ...graph.errors import KvGraphError
from ...graph.types import Keys, SourceLayer

Ints = npt.NDArray[np.int32]
Layers = tuple[tuple[SourceLayer, int, int], ...]
"""Parts of a prompt: ``(source layer, first token, end token)``."""

NOBODY = -1  # no caller stated why an answer ended
_BY_REQUEST: Final = (  # columns of a trace with exactly one row for each request
    "at", "input_tokens", "output_tokens", "prompts", "full", "matchable", "session",
)  # fmt: skip


@dataclass(frozen=True, slots=True, eq=False)
class Statements:
    """Callers' statements: a row per request, in order of arrival."""

    ended: npt.NDArray[np.bool_]  # bool, whether the session ends with it
    # int8, why its answer ended: 1 in a tool call, 0 the turn, -1 unstated.
    waiting: npt.NDArray[np.int8]
    # float64, seconds from its end to the session's next request; NaN: unstated.
    expected_return_s: npt.NDArray[np.float64]
    seconds: npt.NDArray[np.float64]  # float64, how long it took; NaN: unknown
    layers: tuple[Layers, ...]  # the parts of its prompt
    tenant: npt.NDArray[np.int32]  # int32, numbered; -1 if none was named

    @property
    def anything(self) -> bool:
        """Whether any caller stated what a session is doing, or the parts of its prompt."""
        told = (self.ended, ~np.isnan(self.expected_return_s))
        return self.tells_stops or any(bool(c.any()) for c in told) or any(self.layers)

    @property
    def tells_stops(self) -> bool:
        return bool((self.waiting != NOBODY).any())

    def rows(self, part: slice) -> Statements:
        return Statements(*(getattr(self, each.name)[part] for each in fields(self)))


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """Requests in order of arrival.

    A block id stands for a block and its whole prefix: equal ids have equal prefixes.

    Attributes:
        name: The trace's origin, for display.
        block_size: Tokens per block.
        at: float64 ``[requests]``, arrival in seconds since the trace began.
        input_tokens, output_tokens: ``[requests]``.
        starts: int64 ``[requests + 1]``; request i's chain is ``blocks[starts[i]:starts[i+1]]``.
        blocks: int32 block ids ``0 … num_blocks - 1``, prompt first, then known output blocks.
        prompts: ``[requests]``, how many blocks of the chain are prompt; the last may be partial.
        full: ``[requests]``, how many of these are full blocks.
        matchable: ``[requests]``, how many of these a prefix match may cover.
        session: ``[requests]``, numbered in order of appearance.
        last: bool ``[requests]``, whether its session never returns after it.
        has_sessions: Whether sessions were named in the file; otherwise they are inferred from
            chains.
        said: Callers' statements about the requests; None if the format has none.
    """

    name: str
    block_size: int
    at: npt.NDArray[np.float64]
    input_tokens: Ints
    output_tokens: Ints
    starts: npt.NDArray[np.int64]
    blocks: Ints
    prompts: Ints
    full: Ints
    matchable: Ints
    session: Ints
    last: npt.NDArray[np.bool_]
    has_sessions: bool
    said: Statements | None = None

    def __len__(self) -> int:
        return len(self.at)

    @property
    def num_blocks(self) -> int:
        """Number of distinct blocks."""
        return int(self.blocks.max()) + 1 if len(self.blocks) else 0

    @property
    def prompt_blocks(self) -> int:
        """Prompt blocks of all requests, of which hit rates are shares."""
        return int(self.prompts.sum())

    def chain(self, request: int) -> Ints:
        """Return the block ids of a request, the first block first."""
        return self.blocks[self.starts[request] : self.starts[request + 1]]

    def chains(self) -> list[list[int]]:
        """All chains as lists, for a simulation's inner loop."""
        flat, starts = self.blocks.tolist(), self.starts.tolist()
        return [flat[a:b] for a, b in pairwise(starts)]

    def keys(self) -> Keys:
        """uint64, a key for each block id, as evenly distributed as real hashes."""
        # The finalizer of SplitMix64 (Steele et al., OOPSLA 2014): a bijection, so keys are unique.
        keys = np.arange(1, self.num_blocks + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
        keys = (keys ^ (keys >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        keys = (keys ^ (keys >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        return keys ^ (keys >> np.uint64(31))

    def turns(self) -> Ints:
        """``[requests]``: the turn's index in its session, from 0."""
        order = np.argsort(self.session, kind="stable")
        ordered = self.session[order]
        first = np.flatnonzero(np.append(True, ordered[1:] != ordered[:-1]))
        counts = np.diff(np.append(first, len(order)))
        turns = np.empty(len(order), dtype=np.int32)
        turns[order] = np.arange(len(order)) - np.repeat(first, counts)
        return turns

    def unnamed(self) -> Trace:
        """Return the same requests from callers that name no session."""
        return replace(self, has_sessions=False)

    def head(self, share: float) -> Trace:
        """Return the first ``share`` of the requests, with no knowledge of the rest."""
        count = round(len(self) * share)
        starts = self.starts[: count + 1]
        by_request = {name: getattr(self, name)[:count] for name in _BY_REQUEST}
        return replace(
            self,
            name=f"{self.name} (first {share:.0%})",
            starts=starts,
            blocks=self.blocks[: starts[-1]],
            last=last_turns(by_request["session"]),
            said=self.said and self.said.rows(slice(count)),
            **by_request,
        )


def last_turns(session: Ints) -> npt.NDArray[np.bool_]:
    """Return whether each request is the last of its session."""
    last = np.zeros(len(session), dtype=np.bool_)
    _, newest_first = np.unique(session[::-1], return_index=True)
    last[len(session) - 1 - newest_first] = True
    return last


class TraceError(KvGraphError):
    """A trace cannot be read; the message names the file, the line and what is wrong."""

    exit_code = 2


class ReplayError(KvGraphError):
    """A replay was asked for something impossible; the message says what is allowed."""

    exit_code = 2


BYTES_PER_TOKEN: Final = 131_072
"""KV of one token, all layers, of an 8B model in bf16 (32 layers, 8 heads of 128)."""


@dataclass(frozen=True, slots=True)
class ServiceModel:
    """The time an engine takes for a request: prefill at a constant rate, then a step per token.
    The defaults are an 8B model on one H100-class GPU; chosen.
    """

    prefill_tokens_per_s: float = 20_000.0  # prompt tokens computed per second
    decode_s_per_token: float = 0.02  # seconds per output token

    def prefill_seconds(self, computed_tokens: int) -> float:
        return computed_tokens / self.prefill_tokens_per_s

    def seconds(self, computed_tokens: int, output_tokens: int) -> float:
        return self.prefill_seconds(computed_tokens) + output_tokens * self.decode_s_per_token


AGENTS_SERVICE: Final = ServiceModel(prefill_tokens_per_s=9_000.0, decode_s_per_token=0.02)
"""A 70B-class model on H100s, as large agents run on; chosen."""


@dataclass(frozen=True, slots=True)
class HostLink:
    """The cost of loading from host memory; the defaults are PCIe 5 x16 and an 8B model in bf16."""

    bytes_per_s: float = 50e9  # bandwidth
    s_per_transfer: float = 10e-6  # fixed cost of each block's transfer
    bytes_per_token: int = BYTES_PER_TOKEN  # KV of one token, all layers

    def seconds(self, blocks: int, block_size: int) -> float:
        size = blocks * block_size * self.bytes_per_token
        return size / self.bytes_per_s + blocks * self.s_per_transfer
