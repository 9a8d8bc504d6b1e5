"""``Calls``: to which of our parts each of vLLM's calls goes, in order; a part has methods with
vLLM's own names, of those calls that concern it.
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
Told = dict[str, Any] | None  # to the caller of a request that ended: its ``kv_transfer_params``
BlockIds = Sequence[Sequence[int]]  # of each KV cache group


@dataclass(frozen=True, slots=True)
class Calls:
    """Our parts' methods, by the call of vLLM's that they answer; none while not attached."""

    on_new_request: Sequence[Callable[[Request], object]] = ()
    # called before anything is looked up or answered: the prefix cache may have been reset
    catch_up: Sequence[Callable[[], object]] = ()
    # each is given what those before it found, and returns what is found by now
    get_num_new_matched_tokens: Sequence[Callable[[Request, int, Found], Found]] = ()
    update_state_after_alloc: Sequence[Callable[[Request, KVCacheBlocks, int], object]] = ()
    # told that the load which a request was promised could not be ordered
    load_failed: Sequence[Callable[[Request, KVCacheBlocks], object]] = ()
    build_connector_meta: Sequence[Callable[[int, Iterable[str]], TierWork | None]] = ()
    step_ended: Sequence[Callable[[], object]] = ()  # called when a step's output arrived
    # take what the workers moved, and the requests whose loads are over
    answered: Sequence[Callable[[TierAnswer, Iterable[str]], object]] = ()
    sampled: Sequence[Callable[[Iterable[Any]], object]] = ()  # take what the workers sampled
    has_pending_push_work: Sequence[Callable[[], bool]] = ()
    request_finished: Sequence[Callable[[Request, BlockIds], Told]] = ()
    reset_cache: Sequence[Callable[[], bool]] = ()


def calls_of(name: str, *parts: object) -> list[Callable[..., Any]]:
    return [getattr(part, name) for part in parts if hasattr(part, name)]
