"""Which requests engines hold, as their sidecar knows, for vLLM's API process."""

from __future__ import annotations

import asyncio
import logging
import os
import re
import time
from collections.abc import Callable, Collection
from typing import Final

from ....graph.messages.fields import MAX_NAME
from ...sidecar_answer import answer_of
from ..settings import SIDECAR_VARIABLE

logger = logging.getLogger(__name__)

_FRESH_S: Final = 0.5  # an older answer is asked for anew; chosen

_OF_VLLM: Final = r"(?:\d+_)?(?:chatcmpl-(?P<chat>.+)|cmpl-(?P<completion>.+)-\d+)"
"""What vLLM's API makes of a request's name: with ``n`` above 1 an answer's number before it, and a
completion's prompt's number behind it."""
_RANDOM: Final = r"-[0-9a-f]{8}"  # behind all that, unless the operator switched it off
_OF_BATCH: Final = re.compile(r"_\d+$")  # behind the name of a batch of chats, and of some chats


class WaitingRequests:
    """Asks the sidecar of this process's engine, at most twice a second however many wait.

    Args:
        ask: Gets all ids from the sidecar; may raise.
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
                self._names = await asyncio.to_thread(self._fresh)
                self._asked_at = self._clock()
        return name in self._names

    def _fresh(self) -> frozenset[str]:
        """Names of all that are held; on a thread of its own, since there may be thousands."""
        try:
            return names_of(self._ask())
        except Exception as error:  # whoever listens there: the client's request must go on
            logger.debug("kvgraph: nobody says which requests are held: %s", type(error).__name__)
            return frozenset()


def names_of(ids: Collection[str]) -> frozenset[str]:
    """What the clients called chat and completion requests of these ids.

    No name is guessed: an id that vLLM made otherwise, or that was cut, is left out, and so is a
    chat that may be one of a batch or not.
    """
    made = re.compile(_OF_VLLM + ("" if _is_plain() else _RANDOM))
    found = [made.fullmatch(each) for each in ids if len(each) < MAX_NAME]
    chats = {each["chat"] for each in found if each and each["chat"]}
    completions = {each["completion"] for each in found if each and each["completion"]}
    return frozenset(completions | {each for each in chats if not _OF_BATCH.search(each)})


def _is_plain() -> bool:
    """Whether vLLM was told to leave out the random part."""
    from vllm import envs

    return bool(getattr(envs, "VLLM_DISABLE_REQUEST_ID_RANDOMIZATION", False))


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
    return answer_of(known[0], "/waiting").keys()
