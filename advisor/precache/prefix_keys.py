"""By which key a prefix is known: what is named, else what its stable parts are."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, Final

SYSTEM_PREFIX: Final = "conv:__system_prefix__"
"""The key of a system prefix that no conversation owns."""


def prefix_key(
    conversation: str | None = None,
    segments: Sequence[str] = (),
    prefix: str | None = None,
    request: Mapping[str, Any] | None = None,
) -> str:
    """The first of ``conv:``, ``seg:``, ``pfx:`` and ``v5:`` that what is known allows.

    Args:
        segments: The stable parts of a prompt, in their order.
        prefix: The whole text of its stable prefix.
        request: What is sent.
    """
    if conversation:
        return f"conv:{conversation}"
    if segments:
        return f"seg:{_digest(json.dumps(list(segments)))}"
    if prefix:
        return f"pfx:{_digest(prefix)}"
    whole = json.dumps(request or {}, sort_keys=True)
    return f"v5:{uuid.uuid5(uuid.NAMESPACE_OID, whole)}"


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:32]
