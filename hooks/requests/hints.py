"""Reads the hints that a caller puts into ``kv_transfer_params["kvgraph"]``.

    {"segments": [{"layer": "rules", "start": 0, "end": 96, "importance": 0.9,
                   "name": "policy.md", "memory_id": "m-17", "pinned": 60}],
     "tenant": "acme", "session": "chat-7",
     "waiting_for_tool": true, "expected_return_s": 4.0, "tool": "bash",
     "session_ended": false, "recall": true, "share": true, "warming": false}

Every key is optional; ranges are in prompt tokens; the signals describe the session after this
request has finished. Malformed, unknown and forbidden fields (``HintPolicy``; ``"secret"`` may
allow them) are left out, with one warning for each field name: a request never fails for them.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import shlex
import stat
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final, NamedTuple, TypeVar

from ...graph.errors import ConfigError
from ...graph.types import LAYER_BY_NAME, LAYER_NAMES, Authority
from ...graph.wire.events import MAX_NAME, Segment
from ..threads import Once

# Each of these functions reads one field's value. Its ValueError or TypeError continues a sentence
# that begins with the field's name.

MAX_SECONDS: Final = 1e9  # longest expected return or lease; chosen


def name_of(value: object) -> str:
    """Return a name, cut to ``MAX_NAME`` characters."""
    if not isinstance(value, str):
        raise TypeError("must be a string")
    # Lone surrogates cannot be encoded on the wire; they come in through JSON escapes.
    return value[:MAX_NAME].encode("utf-8", "replace").decode()


def flag_of(value: object) -> bool:
    if not isinstance(value, bool):
        raise TypeError("must be true or false")
    return value


def seconds_of(value: object) -> float:
    return _number(value, MAX_SECONDS)


def lease_of(value: object) -> float | None:
    """Return a lease in seconds: the longest possible for true, None for false."""
    if isinstance(value, bool):
        return MAX_SECONDS if value else None
    if not isinstance(value, int | float) or not value >= 0:
        raise ValueError("must be true, or a number of seconds from 0")
    return float(min(value, MAX_SECONDS))


def importance_of(value: object) -> float:
    return _number(value, 1.0)


def _number(value: object, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ValueError(f"must be a number from 0 to {most:g}")
    return float(value)


def token_of(value: object) -> int:
    """Return a token's position in a prompt."""
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < 1 << 31:
        raise ValueError("must be a token position, an integer from 0")
    return value


def layer_of(value: object) -> int:
    """Return a source layer by its name."""
    layer = LAYER_BY_NAME.get(value) if isinstance(value, str) else None
    if layer is None:
        raise ValueError(f"must be one of {', '.join(LAYER_NAMES)}")
    return int(layer)


# ``AITHER_KVCACHE_HINTS``: ``session`` (the default) accepts hints about the caller's own sessions,
# and separates sessions of different cache salts. ``all`` also accepts segments and tenants, which
# affect blocks that others share. ``off`` accepts none. ``secret:FILE`` accepts everything from
# requests that carry the file's content, and nothing from others; such a request speaks for the
# operator, and overrides callers of all engines that share a sidecar.

logger = logging.getLogger(__name__)

HINTS_VARIABLE: Final = "AITHER_KVCACHE_HINTS"
ALLOWED: Final = "all, session, off, or secret:FILE"
_SECRET: Final = "secret:"
_SHORTEST_SECRET: Final = 16  # characters; chosen: too long to guess


class HintTrust(Enum):
    """Which hints of a request count."""

    ALL = "all"
    SESSION = "session"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class HintPolicy:
    """Which requests are trusted, and how far.

    Attributes:
        trust: What a request without the secret may state.
        secret: Secret that makes a request fully trusted; None if there is none.
    """

    trust: HintTrust
    secret: str | None = None

    @property
    def name(self) -> str:
        """The policy as it was configured, without the secret."""
        return self.trust.value if self.secret is None else "secret:…"

    def is_operators(self, presented: object) -> bool:
        """Return whether a request with the secret ``presented`` speaks for the operator."""
        if self.secret is None or not isinstance(presented, str):
            return False
        ours, theirs = self.secret.encode(), presented.encode("utf-8", "surrogatepass")
        return hmac.compare_digest(ours, theirs)

    def trust_in(self, authority: Authority) -> HintTrust:
        """Return what a request with this authority may state."""
        return HintTrust.ALL if authority is Authority.OPERATOR else self.trust


NOBODY: Final = HintPolicy(HintTrust.OFF)


def read_hint_policy(environment: Mapping[str, str]) -> HintPolicy:
    """Return the policy that an environment configures.

    Raises:
        ConfigError: The variable's value is not allowed, or its file cannot be read.
    """
    value = _value(environment)
    if value.startswith(_SECRET):
        return HintPolicy(HintTrust.OFF, _secret_in(Path(value.removeprefix(_SECRET))))
    try:
        return HintPolicy(HintTrust(value.lower()))
    except ValueError:
        raise ConfigError(f"{HINTS_VARIABLE}={value!r}; allowed: {ALLOWED}") from None


def hint_policy(environment: Mapping[str, str]) -> HintPolicy:
    """Return the configured policy; a mistake leaves a warning, and then no hint counts.

    A secret that every user of the machine can read also leaves a warning, but is used.
    """
    try:
        policy = read_hint_policy(environment)
    except ConfigError as error:
        logger.warning("kvgraph: hints are ignored: %s", error)
        return NOBODY
    if exposed := exposed_secret(environment):
        logger.warning("kvgraph: %s; %s", *exposed)
    return policy


class ExposedSecret(NamedTuple):
    """A secret's file that more than its owner and group can open.

    Attributes:
        problem: The file, its mode, and who can open it.
        remedy: The command that fixes it.
    """

    problem: str
    remedy: str


def exposed_secret(environment: Mapping[str, str]) -> ExposedSecret | None:
    """Return what is wrong with the mode of the secret's file; None if nothing is, or there is
    none."""
    value = _value(environment)
    path = Path(value.removeprefix(_SECRET))
    try:
        mode = stat.S_IMODE(path.stat().st_mode) if value.startswith(_SECRET) else 0
    except OSError:
        return None
    may = [word for bit, word in ((0o4, "read"), (0o2, "change")) if mode & bit]
    if not may:
        return None
    users = f"every user of this machine can {' and '.join(may)} it"
    return ExposedSecret(
        f"the secret in {str(path)!r} has mode {mode:04o}: {users}",
        f"chmod 600 {shlex.quote(str(path))}",
    )


def tenant_of_salt(salt: str | None) -> str | None:
    """Return a tenant name that stands for a cache salt; None without a salt.

    The salt is a secret and never leaves the engine, so the name is a digest of it.
    """
    if not salt:
        return None
    digest = hashlib.blake2b(
        salt.encode("utf-8", "surrogatepass"), digest_size=12, person=b"kvgraph salt"
    )
    return f"salt-{digest.hexdigest()}"


def _value(environment: Mapping[str, str]) -> str:
    return environment.get(HINTS_VARIABLE, "").strip() or HintTrust.SESSION.value


def _secret_in(path: Path) -> str:
    try:
        secret = path.read_text("utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or "it is not text"
        raise ConfigError(f"{HINTS_VARIABLE}: cannot read {str(path)!r}: {reason}") from None
    if len(secret) < _SHORTEST_SECRET:
        raise ConfigError(
            f"{HINTS_VARIABLE}: {str(path)!r} holds less than {_SHORTEST_SECRET} characters"
        )
    return secret


KEY: Final = "kvgraph"
SHARE: Final = "share"
MAX_SEGMENTS: Final = 1024  # per request; chosen
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Meaning:
    """A request's hints, checked and clipped."""

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
    """Return whether blocks of a request with these ``kv_transfer_params`` may go to a shared
    store.

    Any caller may forbid it, trusted or not, even with a malformed value.
    """
    tag = params.get(KEY) if isinstance(params, dict) else None
    return not isinstance(tag, dict) or tag.get(SHARE, True) is True


class TagReader:
    """Reads hints as far as ``policy`` trusts them, and warns once per bad field."""

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
        """Return the hints of a request's ``kv_transfer_params`` that count.

        Args:
            prompt_tokens: Length of the prompt; ranges are clipped to it.
            session_id: vLLM's own session id; it overrides the hinted one.
            salt: The cache salt; it identifies the tenant unless a trusted hint does.
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
        if session_id and trust is not HintTrust.OFF:
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

    def _may(self, trust: HintTrust, name: str) -> bool:
        """Return whether a request of this trust may state ``name``; warn if not."""
        if trust is HintTrust.ALL or (trust is HintTrust.SESSION and name in _OF_A_SESSION):
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
