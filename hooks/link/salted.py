"""``SaltedContents``: whether requests' contents are to be told, apart from their cache salts."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from .mailbox import Mailbox
from .prompt_digests import PromptDigests


class Prompt(Protocol):
    """A request, as an engine has it."""

    cache_salt: str | None
    prompt_token_ids: Sequence[int] | None
    lora_request: Any
    mm_features: Any


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
        tokens = request.prompt_token_ids
        if not self._has_salts or key is None or tokens is None:
            return None
        if request.lora_request is not None or request.mm_features:
            return None
        return PromptDigests(key, tokens, self._block_size, salt)
