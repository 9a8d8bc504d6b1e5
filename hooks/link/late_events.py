"""Events that are made on the thread that sends, of what a step put by."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from ...graph.messages.events import AnyEvent, Event, RequestFinished, RequestStarted
from ..keys import pack_hashes
from .outbox import Later
from .prompt_digests import PromptDigests
from .recent_prompts import LatePrompt


class LateHashes:
    """A request's start or end whose hashes are packed when it is sent.

    Args:
        event: The rest of it.
        hashes: Of its full blocks; not changed any more.
        contents: What a prompt that starts says, where that is to be told.
        prompt: A prompt that starts, to be told how far it goes along with another one.
    """

    __slots__ = ("_contents", "_event", "_hashes", "_prompt")

    def __init__(
        self,
        event: AnyEvent | Later,
        hashes: Sequence[bytes],
        contents: PromptDigests | None = None,
        prompt: LatePrompt | None = None,
    ) -> None:
        self._event = event
        self._hashes = hashes
        self._contents = contents
        self._prompt = prompt

    def events(self) -> Sequence[AnyEvent]:
        """The whole event."""
        made = [self._event] if isinstance(self._event, Event) else self._event.events()
        whole: dict[str, Any] = {"hashes": pack_hashes(self._hashes)}
        if self._contents is not None:
            whole |= {"contents": self._contents.digests(), "salt": self._contents.salt()}
        if self._prompt is not None:
            whole["same_tokens"] = self._prompt.same_tokens(self._hashes)
        return [
            msgspec.structs.replace(event, **whole)
            if isinstance(event, RequestStarted | RequestFinished)
            else event
            for event in made
        ]
