"""Takes the place of ``Holding`` for a scheduler whose new sessions are never held."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....graph.messages.events import AnyEvent

if TYPE_CHECKING:
    from vllm.v1.request import Request


class NoHolding:
    """Lets every request in; see ``Holding``."""

    def arrived(self, request: Request) -> bool:
        """False: hold no request."""
        return False

    def is_held(self, request_id: str) -> bool:
        """False: no request is held."""
        return False

    def scheduled(self, request: Request) -> None:
        """Do nothing."""

    def removed(self, request_id: str) -> None:
        """Do nothing."""

    def finished(self, request: Request) -> None:
        """Do nothing."""

    def step(self) -> None:
        """Do nothing."""

    def end(self) -> None:
        """Do nothing."""

    def told(self) -> list[AnyEvent]:
        """Nothing: no request waits."""
        return []
