"""A scheduler whose new sessions are never held."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ....graph.messages.events import AnyEvent

if TYPE_CHECKING:
    from vllm.v1.request import Request


class NoHolding:
    """Lets every request in; see ``Holding``."""

    def arrived(self, request: Request) -> bool:
        """A new request is not held."""
        return False

    def is_held(self, request_id: str) -> bool:
        """No request is."""
        return False

    def scheduled(self, request: Request) -> None:
        """Nothing follows from it."""

    def removed(self, request_id: str) -> None:
        """It was not held."""

    def finished(self, request: Request) -> None:
        """Nothing follows from it."""

    def step(self) -> None:
        """Nobody waits to be released."""

    def end(self) -> None:
        """There is nobody to release."""

    def told(self) -> list[AnyEvent]:
        """Nobody waits."""
        return []
