"""``SaltedContents``: whether requests' contents are to be told, apart from their cache salts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from .mailbox import Mailbox
from .prompt_digests import PromptDigests


class Prompt(Protocol):
    """A request, as an engine has it; one without ``prompt_token_ids`` is not told."""

    cache_salt: str | None
    lora_request: Any


class SaltedContents:
    """Says so of every request from the first one with a cache salt on: an engine whose callers
    use no salts pays nothing.

    Args:
        mailbox: Has the sidecar's key.
        block_size: Tokens.
    """

    def __init__(self, mailbox: Mailbox, block_size: int) -> None:
        self._mailbox = mailbox
        self._block_size = block_size
        self._has_salts = False

    def of(self, request: Prompt) -> PromptDigests | None:
        """What a request says, for the client's thread to digest; reads a few attributes.

        None where hashes differ by more than a salt: with an adapter, images, or embeddings.
        """
        salt, key = request.cache_salt, self._mailbox.content_key
        self._has_salts = self._has_salts or salt is not None
        tokens: Sequence[int] | None = getattr(request, "prompt_token_ids", None)
        if not self._has_salts or key is None or tokens is None:
            return None
        if request.lora_request is not None or getattr(request, "mm_features", None):
            return None
        return PromptDigests(key, tokens, self._block_size, salt)
