"""``Calls``: which of our parts answer each of vLLM's calls, and in which order. A part has methods
with vLLM's own names for the calls that concern it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheBlocks
    from vllm.v1.request import Request

    from ..tiers.jobs import TierAnswer, TierWork

Found = tuple[int | None, bool]
"""How many tokens a load can bring (None: ask again), and whether the request waits for them."""
Told = dict[str, Any] | None  # ``kv_transfer_params`` returned to the caller of a finished request
BlockIds = Sequence[Sequence[int]]  # block ids for each KV cache group


@dataclass(frozen=True, slots=True)
class Calls:
    """Our parts' methods, grouped by the vLLM call that they answer; empty while not attached."""

    on_new_request: Sequence[Callable[[Request], object]] = ()
    # called before any lookup or answer, since the prefix cache may have been reset
    catch_up: Sequence[Callable[[], object]] = ()
    # each gets the result of the ones before it, and returns the combined result
    get_num_new_matched_tokens: Sequence[Callable[[Request, int, Found], Found]] = ()
    update_state_after_alloc: Sequence[Callable[[Request, KVCacheBlocks, int], object]] = ()
    # called when a load that was promised to a request could not be ordered
    load_failed: Sequence[Callable[[Request, KVCacheBlocks], object]] = ()
    build_connector_meta: Sequence[Callable[[int, Iterable[str]], TierWork | None]] = ()
    step_ended: Sequence[Callable[[], object]] = ()  # called when a step's output arrives
    # take the workers' finished transfers, and the requests whose loads ended
    answered: Sequence[Callable[[TierAnswer, Iterable[str]], object]] = ()
    sampled: Sequence[Callable[[Iterable[Any]], object]] = ()  # take the workers' samples
    has_pending_push_work: Sequence[Callable[[], bool]] = ()
    request_finished: Sequence[Callable[[Request, BlockIds], Told]] = ()
    reset_cache: Sequence[Callable[[], bool]] = ()


def calls_of(name: str, *parts: object) -> list[Callable[..., Any]]:
    return [getattr(part, name) for part in parts if hasattr(part, name)]
