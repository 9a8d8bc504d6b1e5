"""What a caller says of a request in ``kv_transfer_params["kvgraph"]``.

    {"segments": [{"layer": "rules", "start": 0, "end": 96, "importance": 0.9,
                   "name": "policy.md", "memory_id": "m-17", "pinned": 60}],
     "tenant": "acme", "session": "chat-7",
     "waiting_for_tool": true, "expected_return_s": 4.0, "tool": "bash",
     "session_ended": false, "recall": true, "share": true, "warming": false}

Every key is optional; ranges are prompt tokens; the signals describe the session once this request
has finished. What is malformed, unknown or not allowed (``hint_policy.py``; ``"secret"`` may allow
it) is left out, with one warning for each field name: a request never fails for it.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final, TypeVar

from ....graph.messages.events import Segment
from ....graph.types import Authority
from ...once import Once
from .hint_policy import HINTS_VARIABLE, HintPolicy, Trust, tenant_of_salt
from .hint_values import (
    flag_of,
    importance_of,
    layer_of,
    lease_of,
    name_of,
    seconds_of,
    token_of,
)

logger = logging.getLogger(__name__)

KEY: Final = "kvgraph"
SHARE: Final = "share"
MAX_SEGMENTS: Final = 1024  # per request; chosen
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Meaning:
    """One request's meaning, checked and clipped."""

    segments: tuple[Segment, ...] = ()
    tenant: str | None = None
    session: str | None = None
    waiting_for_tool: bool | None = None
    expected_return_s: float | None = None
    session_ended: bool = False
    tool: str | None = None
    recall: bool | None = None
    warming: bool = False


NO_MEANING: Final = Meaning()
_SEGMENT_KEYS: Final = frozenset(
    {"layer", "start", "end", "importance", "name", "memory_id", "pinned"}
)


def may_be_shared(params: object) -> bool:
    """Whether blocks of a request with these ``kv_transfer_params`` may go to a shared store.

    Whoever is not trusted with any hint may still forbid it, also with a word that is not allowed.
    """
    tag = params.get(KEY) if isinstance(params, dict) else None
    return not isinstance(tag, dict) or tag.get(SHARE, True) is True


class TagReader:
    """Reads tags as far as ``policy`` trusts them, and warns once per bad field."""

    def __init__(self, policy: HintPolicy) -> None:
        self._policy = policy
        self._once = Once(logger)

    def read(
        self,
        params: object,
        prompt_tokens: int,
        session_id: str | None = None,
        salt: str | None = None,
    ) -> Meaning:
        """What counts of a request's ``kv_transfer_params``, and whose request it is.

        Args:
            prompt_tokens: Ranges are clipped to so many.
            session_id: vLLM's own; it has precedence over the tag's.
            salt: The cache salt: it tells tenants apart if the tag may not.
        """
        if not params and not session_id and not salt:
            return NO_MEANING  # nothing is said
        tag = self._tag(params)
        tag.pop(SHARE, None)  # may_be_shared() reads it, whoever is trusted
        is_operators = self._policy.is_operators(tag.pop("secret", None))
        authority = Authority.OPERATOR if is_operators else Authority.CALLER
        trust = self._policy.trust_in(authority)
        fields: dict[str, Any] = {"tenant": tenant_of_salt(salt)}
        for name, value in tag.items():
            if name not in ("segments", *_READERS):
                self._warn("an unknown key", f"is not one of segments, {', '.join(_READERS)}")
            elif not self._may(trust, name) or value is None:
                continue
            elif name == "segments":
                fields[name] = self._segments(value, prompt_tokens, authority)
            elif (read := self._field(name, value, _READERS[name])) is not None:
                fields[name] = read
        if session_id and trust is not Trust.OFF:
            fields["session"] = name_of(session_id)
        known = {name: value for name, value in fields.items() if value is not None}
        return Meaning(**known) if known else NO_MEANING

    def _tag(self, params: object) -> dict[str, Any]:
        tag = params.get(KEY) if isinstance(params, dict) else None
        if tag is None:
            return {}
        if not isinstance(tag, dict):
            self._warn(KEY, "must be an object")
            return {}
        return dict(tag)

    def _may(self, trust: Trust, name: str) -> bool:
        """Whether a request trusted so far may say ``name``."""
        if trust is Trust.ALL or (trust is Trust.SESSION and name in _OF_A_SESSION):
            return True
        self._warn(name, f"not allowed by {HINTS_VARIABLE}={self._policy.name}")
        return False

    def _segments(
        self, value: object, prompt_tokens: int, authority: Authority
    ) -> tuple[Segment, ...]:
        if not isinstance(value, list):
            self._warn("segments", "must be a list")
            return ()
        if len(value) > MAX_SEGMENTS:
            self._warn("segments", f"holds entries beyond the first {MAX_SEGMENTS}")
        read = (self._segment(item, prompt_tokens, authority) for item in value[:MAX_SEGMENTS])
        return tuple(segment for segment in read if segment is not None)

    def _segment(self, item: object, prompt_tokens: int, authority: Authority) -> Segment | None:
        if not isinstance(item, dict):
            self._warn("segments", "must hold objects")
            return None
        if not _SEGMENT_KEYS.issuperset(item):
            self._warn(
                "an unknown segment key", f"is not one of {', '.join(sorted(_SEGMENT_KEYS))}"
            )
        layer = self._field("segments.layer", item.get("layer"), layer_of)
        start = self._field("segments.start", item.get("start"), token_of)
        end = self._field("segments.end", item.get("end"), token_of)
        if layer is None or start is None or end is None:
            return None
        end = min(end, prompt_tokens)
        if start >= end:
            return None  # outside the prompt, or empty: nothing to say
        return Segment(
            layer,
            start,
            end,
            self._optional("segments.importance", item.get("importance"), importance_of),
            self._optional("segments.name", item.get("name"), name_of),
            self._optional("segments.memory_id", item.get("memory_id"), name_of),
            int(authority),
            self._optional("segments.pinned", item.get("pinned"), lease_of),
        )

    def _optional(self, name: str, value: object, read: Callable[[object], T]) -> T | None:
        return None if value is None else self._field(name, value, read)

    def _field(self, name: str, value: object, read: Callable[[object], T]) -> T | None:
        try:
            return read(value)
        except (ValueError, TypeError) as error:
            self._warn(name, str(error))
            return None

    def _warn(self, field: str, problem: str) -> None:
        message = 'kvgraph: kv_transfer_params["%s"]: %s %s; ignored (said once)'
        self._once.warn(field, message, KEY, field, problem)


_OF_A_SESSION: Final = frozenset(
    {
        "session",
        "waiting_for_tool",
        "expected_return_s",
        "tool",
        "session_ended",
        "recall",
        "warming",
    }
)
_READERS: Final[dict[str, Callable[[object], Any]]] = {
    "tenant": name_of,
    "session": name_of,
    "waiting_for_tool": flag_of,
    "expected_return_s": seconds_of,
    "tool": name_of,
    "session_ended": flag_of,
    "recall": flag_of,
    "warming": flag_of,
}
