"""``OptIn``: which requests' text is kept and brought back, and whose text it is."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from enum import Enum
from typing import TYPE_CHECKING

from ...recall.said_blocks import Domain
from ..settings import OFF, ON, RECALL_VARIABLE
from .own_branch import Owner

if TYPE_CHECKING:
    from vllm.v1.request import Request

    from ..hints.tags import Meaning

logger = logging.getLogger(__name__)


class Switch(Enum):
    """Whose requests are approximate where spans are held."""

    NOBODY = "0"
    WHO_ASKS = ""
    EVERYBODY = "1"


def recall_switch() -> Switch:
    """What the environment says; a value that means nothing leaves a warning, and changes nothing:
    nobody's answers are to become approximate by a slip of the pen."""
    value = os.environ.get(RECALL_VARIABLE, "").strip().lower()
    if value in OFF:
        return Switch.NOBODY
    if value in ON:
        return Switch.EVERYBODY
    if value:
        logger.warning(
            "%s=%r; allowed: 1 (all requests), 0 (none), or unset (those that ask): taken as unset",
            RECALL_VARIABLE, value[:40],
        )  # fmt: skip
    return Switch.WHO_ASKS


class OptIn:
    """Knows of each request under way whether it opted in.

    Args:
        everybody: Whether a request that says nothing opted in.
        meaning: What a request's caller says.
        shared: Whether all who name no tenant and have no cache salt may see one another.
    """

    def __init__(
        self, everybody: bool, meaning: Callable[[Request], Meaning], shared: bool = False
    ) -> None:
        self._everybody, self._meaning, self._shared = everybody, meaning, shared
        self._nobodys: set[str] = set()  # requests under way that ask, and say not whose they are
        self._domains: dict[str, Domain | None] = {}
        self._owners: dict[str, Owner] = {}

    def owner(self, request: Request) -> Owner | None:
        """Which named session an opted-in request belongs to; None without."""
        return self._owners.get(request.request_id) if self.domain(request) else None

    def domain(self, request: Request) -> Domain | None:
        """Whose text a request may use and leave; None if it did not opt in.

        It is asked for the first time before the request is scheduled.
        """
        if request.request_id not in self._domains:
            self._domains[request.request_id] = self._read(request)
        return self._domains[request.request_id]

    def is_nobodys(self, request_id: str) -> bool:
        """Whether a request asked in words, and does not say whose text it is."""
        return request_id in self._nobodys

    def forget(self, request_id: str) -> None:
        """Note that a request ended."""
        self._nobodys.discard(request_id)
        self._domains.pop(request_id, None)
        self._owners.pop(request_id, None)

    def _read(self, request: Request) -> Domain | None:
        # Tokens say all of the content only where plain weights were given nothing else than text.
        if request.mm_features or request.prompt_embeds is not None or request.lora_request:
            return None
        if request.skip_reading_prefix_cache:
            return None
        meaning = self._meaning(request)
        wanted = self._everybody if meaning.recall is None else meaning.recall
        if not wanted:
            return None
        domain = self._domain(request.cache_salt, meaning)
        if domain is None:
            if meaning.recall:
                self._nobodys.add(request.request_id)
        elif meaning.session is not None:
            self._owners[request.request_id] = domain, meaning.session
        return domain

    def _domain(self, salt: str | None, meaning: Meaning) -> Domain | None:
        """Who may see one another: a tenant, those with one salt, else a session alone."""
        if self._shared or salt or meaning.tenant:
            return salt or "", meaning.tenant or "", ""
        return None if meaning.session is None else ("", "", meaning.session)
