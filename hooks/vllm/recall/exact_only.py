"""``ExactOnly``: keeps what is approximate out of vLLM's prefix cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vllm.v1.core.kv_cache_manager import KVCacheManager
    from vllm.v1.request import Request


class ExactOnly:
    """Lets a request register its blocks only up to its first approximate token.

    vLLM registers whatever a request holds under hashes of its tokens, which say that it was
    computed behind exactly these tokens. Everything that enters the prefix cache, full blocks and
    parts of them, passes ``cache_blocks`` of its KV cache group's manager. That method is shadowed
    on the instance when the first request needs it, above whatever else follows the pool. It stays
    so when the rest of us leaves the engine: requests that are under way stay approximate.

    Args:
        manager: vLLM's record of which request holds which blocks.
    """

    def __init__(self, manager: KVCacheManager) -> None:
        self._managers: list[Any] = list(manager.coordinator.single_type_managers)
        self._limits: dict[str, int] = {}
        self._attached = False

    def limit(self, request_id: str, tokens: int) -> None:
        """From now on, register only the request's first ``tokens`` tokens."""
        if not self._attached:
            for manager in self._managers:
                manager.cache_blocks = _limited(manager.cache_blocks, self._limits)
            self._attached = True
        self._limits[request_id] = min(tokens, self._limits.get(request_id, tokens))

    def exact_tokens(self, request_id: str) -> int | None:
        """How many of a request's tokens may be registered; None: all."""
        return self._limits.get(request_id)

    def forget(self, request_id: str) -> None:
        """Note that a request ended: it registers nothing any more."""
        self._limits.pop(request_id, None)


def _limited(original: Callable[..., None], limits: dict[str, int]) -> Callable[..., None]:
    def cache_blocks(request: Request, num_tokens: int, *args: Any, **kwargs: Any) -> None:
        limit = limits.get(request.request_id)
        original(request, num_tokens if limit is None else min(limit, num_tokens), *args, **kwargs)

    return cache_blocks
