"""Which requests engines hold, as their sidecar knows, for vLLM's API process."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
import urllib.request
from collections.abc import Callable, Collection
from typing import Final

from ..settings import SIDECAR_VARIABLE

_FRESH_S: Final = 0.5  # an older answer is asked for anew; chosen
_PATIENCE_S: Final = 2.0  # for an answer; chosen
_MOST_BYTES: Final = 8 << 20

_OF_VLLM: Final = re.compile(r"(?:cmpl|chatcmpl|resp)[-_](.*?)(?:-\d+)?(?:-[0-9a-f]{8})?")
"""What vLLM's API makes of a request's name: a prompt's number and a random part behind it."""


class WaitingRequests:
    """Asks the sidecar of this process's engine, at most twice a second however many wait.

    Args:
        ask: Gets all names from the sidecar; raises OSError or ValueError if it cannot.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        ask: Callable[[], Collection[str]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._ask = ask or ask_sidecar
        self._clock = clock
        self._lock = asyncio.Lock()
        self._names: frozenset[str] = frozenset()
        self._asked_at = float("-inf")

    async def holds(self, name: str) -> bool:
        """Whether a request of this name is held now; False where nobody can say."""
        async with self._lock:
            if self._clock() - self._asked_at >= _FRESH_S:
                self._names = await self._fresh()
                self._asked_at = self._clock()
        return name in self._names

    async def _fresh(self) -> frozenset[str]:
        try:
            ids = await asyncio.to_thread(self._ask)
        except (OSError, ValueError):
            return frozenset()
        return frozenset(found[1] for each in ids if (found := _OF_VLLM.fullmatch(each)))


def ask_sidecar() -> Collection[str]:
    """Ids of all requests that engines hold.

    Raises:
        OSError: There is no sidecar, or it does not answer.
        ValueError: It answers something else.
    """
    from ....graph.errors import ConfigError
    from ....graph.ipc.runtime import running_sidecars

    endpoint = os.environ.get(SIDECAR_VARIABLE, "")
    try:
        known = [each for each in running_sidecars() if each.endpoint == endpoint]
    except ConfigError as error:
        raise OSError(str(error)) from None
    if not known:
        raise OSError(f"no sidecar of this user listens on {endpoint!r}")
    headers = {"Authorization": f"Bearer {known[0].token}"}
    request = urllib.request.Request(f"{known[0].http}/waiting", headers=headers)
    direct = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with direct.open(request, timeout=_PATIENCE_S) as answer:
        names = json.loads(answer.read(_MOST_BYTES))
    if not isinstance(names, dict):
        raise ValueError("the sidecar's answer is no object")
    return names.keys()
