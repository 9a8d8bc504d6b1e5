"""Reads the hints that a caller puts into ``kv_transfer_params["kvgraph"]``.

    {"segments": [{"layer": "rules", "start": 0, "end": 96, "importance": 0.9,
                   "name": "policy.md", "memory_id": "m-17", "pinned": 60}],
     "tenant": "acme", "session": "chat-7",
     "waiting_for_tool": true, "expected_return_s": 4.0, "tool": "bash",
     "session_ended": false, "recall": true, "share": true, "warming": false}

Every key is optional; ranges are in prompt tokens; the signals describe the session after this
request has finished. Malformed, unknown and forbidden fields (``HintPolicy``; ``"secret"`` may
allow them) are left out, with one warning for each field name: a request never fails for them.

``translate_hints`` translates the hints of orchestrators and agent schedulers.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import logging
import shlex
import stat
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from types import MappingProxyType
from typing import Annotated, Any, Final, NamedTuple, TypeVar

import msgspec

from ...graph.errors import ConfigError
from ...graph.types import LAYER_BY_NAME, LAYER_NAMES, Authority, SourceLayer
from ...graph.wire.events import MAX_NAME, Name, Segment
from ...graph.wire.frames import BAD_PAYLOAD
from ..settings import HINTS_VARIABLE, EngineSettings
from ..threads import Once

# Hint formats of other programs. vLLM's envelope of KV hints (``Request.kv_hints``; Dynamo puts it
# into ``kv_transfer_params["kv_hint"]``): ``kv.retain`` sets an importance and a lease,
# ``kv.evict`` of a request's own blocks ends its session. ``kv.fetch`` and actions that name only
# blocks are left to connectors. llm-d's router: ``retention_directives`` among the extra arguments,
# with the fields of ``kv.retain``. Continuum: ``job_id``, ``is_last_step`` and ``this_func_call``
# among the extra arguments.
_ENVELOPES: Final = ("kv_hint", "kv_hints")
_DIRECTIVES: Final = "retention_directives"
_VERSIONS: Final = ("0", "1")  # major versions whose payloads are understood
_MOST_ACTIONS: Final = 64  # of one envelope; chosen
_MOST_DIRECTIVES: Final = 1024  # of one request; chosen, as many as segments
_LONGEST: Final = 1 << 20  # characters of directives in a string; chosen
_LAYER: Final = SourceLayer.CONTEXT.name.lower()  # the layer of retained ranges, which name none
_TOKENS: Final = 1 << 31  # positions in a prompt
_TO_THE_END: Final = _TOKENS - 1
_FULL: Final = 100  # the highest priority
_LEASED_FROM: Final = 50  # a lower priority gets no lease, whatever duration it states
_YES: Final = (True, 1, "1", "true", "True")
_NO: Final = (False, 0, "0", "false", "False")


def translate_hints(request: Any) -> dict[str, Any]:
    """Translate a request's hints from the forms of other programs into kvgraph's fields.

    Reads Continuum's ``extra_args``, cache directives, and the actions ``kv.retain`` and
    ``kv.evict``. Values are passed on unchecked; ``HintReader`` checks them like a caller's own.
    Returns an empty mapping if the request has no such hints.
    """
    sampling = getattr(request, "sampling_params", None)
    extra = getattr(sampling, "extra_args", None) or {}
    params = request.kv_transfer_params
    envelopes = [getattr(request, "kv_hints", None)]
    if isinstance(params, Mapping):
        envelopes += [params.get(name) for name in _ENVELOPES]
    if not extra and not any(envelopes):
        return {}
    said = _of_continuum(extra)
    segments = list(_of_directives(extra.get(_DIRECTIVES)))
    for kind, payload in _actions(envelopes):
        if kind == "kv.retain":
            segments += _of_retain(payload)
        elif kind == "kv.evict" and payload.get("include_current_request") is True:
            said["session_ended"] = True
    if segments:
        said["segments"] = segments[:_MOST_DIRECTIVES]
    return said


def says_nothing(request: Any) -> bool:
    """Return whether a request has no hints at all, so that ``translate_hints`` and ``HintReader``
    need not be called. True for most requests that name no session.
    """
    if request.kv_transfer_params or request.session_id or request.cache_salt:
        return False
    sampling = getattr(request, "sampling_params", None)
    return not (getattr(sampling, "extra_args", None) or getattr(request, "kv_hints", None))


def _actions(envelopes: list[Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
    for envelope in envelopes:
        actions = _of(envelope, "actions")
        for action in actions[:_MOST_ACTIONS] if isinstance(actions, list) else ():
            kind, payload = _of(action, "action_type"), _of(action, "payload")
            version = _of(action, "action_version")
            known = isinstance(version, str) and version.partition(".")[0] in _VERSIONS
            if known and isinstance(kind, str) and isinstance(payload, Mapping):
                yield kind, payload


def _of(value: Any, name: str) -> Any:
    """A field of vLLM's own type, or of the object that it is in JSON."""
    return value.get(name) if isinstance(value, Mapping) else getattr(value, name, None)


def _of_retain(payload: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    yield from _of_directives(payload.get("directives"))
    if payload.get("include_current_request") is True:
        # It also names hashes of blocks, with priorities whose scale is not specified.
        yield _segment(0, None, None, payload.get("ttl_seconds"))


def _of_directives(said: Any) -> Iterator[dict[str, Any]]:
    if isinstance(said, str) and len(said) <= _LONGEST:
        try:
            said = msgspec.json.decode(said)
        except BAD_PAYLOAD:
            return
    for each in said[:_MOST_DIRECTIVES] if isinstance(said, list) else ():
        if isinstance(each, Mapping) and each.get("covers_output") is not True:
            priority = each.get("priority")
            yield _segment(each.get("start", 0), each.get("end"), priority, each.get("duration"))


def _segment(start: Any, end: Any, priority: Any, seconds: Any) -> dict[str, Any]:
    said = {"layer": _LAYER, "start": start, "end": _TO_THE_END if end is None else end}
    known = isinstance(priority, int | float) and 0 <= priority <= _FULL
    if priority is not None:
        said["importance"] = priority / _FULL if known and priority is not True else priority
    if seconds is not None and (priority is None or (known and priority >= _LEASED_FROM)):
        said["pinned"] = seconds
    return said


def _of_continuum(extra: Mapping[str, Any]) -> dict[str, Any]:
    job = extra.get("job_id")
    if not isinstance(job, str) or not job:
        return {}
    said: dict[str, Any] = {"session": job}
    last, tool = extra.get("is_last_step"), extra.get("this_func_call")
    if _is_one_of(last, _YES):
        said["session_ended"] = True
    elif isinstance(tool, str) and tool and (last is None or _is_one_of(last, _NO)):
        said |= {"waiting_for_tool": True, "tool": tool}
    return said


def _is_one_of(value: Any, values: tuple[Any, ...]) -> bool:
    return isinstance(value, bool | int | str) and value in values


# Each of these functions reads one field's value. Its ValueError or TypeError continues a sentence
# that begins with the field's name.

_LONGEST_NAME: Final = 1 << 16  # characters compared between names; chosen: a body may be one name
_OF_NAME: Final = 8  # bytes of the digest that ends a shortened name; chosen
MAX_SECONDS: Final = 1e9  # longest expected return or lease; chosen


def name_of(value: object) -> str:
    if not isinstance(value, str):
        raise TypeError("must be a string")
    # Lone surrogates cannot be encoded on the wire; they come in through JSON escapes.
    name = value[:MAX_NAME].encode("utf-8", "replace").decode()
    if name == value:
        return name
    # Two tenants or sessions would be one where only what is left out tells them apart.
    said = value[:_LONGEST_NAME].encode("utf-8", "surrogatepass")
    digest = hashlib.blake2b(said, digest_size=_OF_NAME).hexdigest()
    return f"{name[: MAX_NAME - 2 * _OF_NAME - 1]}~{digest}"


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


def priority_of(value: object) -> float:
    return _number(value, _FULL) / _FULL


def _number(value: object, most: float) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= most:
        raise ValueError(f"must be a number from 0 to {most:g}")
    return float(value)


def token_of(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _TOKENS:
        raise ValueError("must be a token position, an integer from 0")
    return value


def layer_of(value: object) -> int:
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

_SECRET: Final = "secret:"
_SHORTEST_SECRET: Final = 16  # characters; chosen: too long to guess


class HintTrust(Enum):
    """Which hints of a request are accepted."""

    ALL = "all"
    SESSION = "session"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class HintPolicy:
    trust: HintTrust  # what a request without the secret may state
    secret: str | None = None  # secret that makes a request fully trusted; None if there is none

    @property
    def name(self) -> str:
        return self.trust.value if self.secret is None else "secret:…"

    def is_operators(self, presented: object) -> bool:
        """Return whether a request with the secret ``presented`` speaks for the operator."""
        if self.secret is None or not isinstance(presented, str):
            return False
        ours, theirs = self.secret.encode(), presented.encode("utf-8", "surrogatepass")
        return hmac.compare_digest(ours, theirs)


NOBODY: Final = HintPolicy(HintTrust.OFF)


def read_hint_policy(settings: EngineSettings) -> HintPolicy:
    """Return the policy that the settings configure; raises ConfigError."""
    settings.require("hints")
    if settings.hints.startswith(_SECRET):
        return HintPolicy(HintTrust.OFF, _secret_in(Path(settings.hints.removeprefix(_SECRET))))
    return HintPolicy(HintTrust(settings.hints.lower()))


def hint_policy(settings: EngineSettings) -> HintPolicy:
    """Return the configured policy. A wrong setting logs a warning, and then no hint is accepted. A
    secret file that every user of the machine can read logs a warning and is used.
    """
    try:
        policy = read_hint_policy(settings)
    except ConfigError as error:
        logger.warning("kvgraph: hints are ignored: %s", error)
        return NOBODY
    if exposed := exposed_secret(settings):
        logger.warning("kvgraph: %s; %s", *exposed)
    return policy


class ExposedSecret(NamedTuple):
    problem: str  # the file, its mode, and who can open it
    remedy: str  # the command that fixes it


def exposed_secret(settings: EngineSettings) -> ExposedSecret | None:
    """Return what is wrong with the mode of the secret's file; None if nothing."""
    value = settings.hints
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
    """Return a tenant name that stands for a cache salt; None without a salt. The salt is a secret
    and never leaves the engine, so the name is a digest of it.
    """
    if not salt:
        return None
    digest = hashlib.blake2b(
        salt.encode("utf-8", "surrogatepass"), digest_size=12, person=b"kvgraph salt"
    )
    return f"salt-{digest.hexdigest()}"


def _secret_in(path: Path) -> str:
    try:
        if path.exists() and not path.is_file():  # the engine would wait for a pipe's other end
            raise OSError(errno.EINVAL, "it is no regular file")
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
class CheckedHints:
    segments: tuple[Segment, ...] = ()
    tenant: str | None = None
    session: str | None = None
    waiting_for_tool: bool | None = None
    expected_return_s: float | None = None
    session_ended: bool = False
    tool: str | None = None
    recall: bool | None = None
    warming: bool = False


NO_HINTS: Final = CheckedHints()
NOTHING: Final[Mapping[str, Any]] = MappingProxyType({})


def may_be_shared(params: object) -> bool:
    """Return whether blocks of a request with these ``kv_transfer_params`` may go to a shared
    store. Any caller may forbid it, trusted or not, even with a malformed value.
    """
    tag = params.get(KEY) if isinstance(params, dict) else None
    return tag is None or (isinstance(tag, dict) and tag.get(SHARE, True) is True)


_NUMBERS: Final = {name: int(layer) for name, layer in LAYER_BY_NAME.items()}


class _Said(msgspec.Struct, forbid_unknown_fields=True, gc=False):
    """A segment in which nothing is wrong, as `HintReader` reads it field by field, but for its
    layer.
    """

    layer: str
    start: Annotated[int, msgspec.Meta(ge=0, lt=_TOKENS)]
    end: Annotated[int, msgspec.Meta(ge=0, lt=_TOKENS)]
    importance: Annotated[float, msgspec.Meta(ge=0, le=1)] | None = None
    name: Name | None = None
    memory_id: Name | None = None
    pinned: Annotated[float, msgspec.Meta(ge=0, le=MAX_SECONDS)] | None = None


def _well_formed(said: Sequence[_Said], prompt_tokens: int, authority: int) -> tuple[Segment, ...]:
    """Raises KeyError for an unknown layer."""
    return tuple(
        [
            Segment(
                _NUMBERS[each.layer], each.start, min(each.end, prompt_tokens), each.importance,
                each.name and name_of(each.name), each.memory_id and name_of(each.memory_id),
                authority, each.pinned,
            )
            for each in said
            if each.start < each.end and each.start < prompt_tokens
        ]
    )  # fmt: skip


class HintReader:
    """Reads hints as far as ``policy`` trusts them, and warns once per bad field."""

    def __init__(self, policy: HintPolicy) -> None:
        self._policy = policy
        self._once = Once(logger)

    def read(
        self,
        params: object,
        prompt_tokens: int,  # length of the prompt; ranges are clipped to it
        session_id: str | None = None,  # vLLM's own session id; it overrides the hinted one
        # the cache salt; it identifies the tenant unless a trusted hint does
        salt: str | None = None,
        # hints from `translate_hints`; the tag's own override them
        others: Mapping[str, Any] = NOTHING,
    ) -> CheckedHints:
        """Return the accepted hints from a request's ``kv_transfer_params``."""
        if not params and not session_id and not salt and not others:
            return NO_HINTS  # nothing is said
        tag = {**others, **self._tag(params)}
        tag.pop(SHARE, None)  # may_be_shared() reads it, whoever is trusted
        is_operators = self._policy.is_operators(tag.pop("secret", None))
        authority = Authority.OPERATOR if is_operators else Authority.CALLER
        trust = HintTrust.ALL if is_operators else self._policy.trust
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
        return CheckedHints(**known) if known else NO_HINTS

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
        said = value[:MAX_SEGMENTS]
        try:  # a long chat has hundreds, and the scheduler waits
            return _well_formed(msgspec.convert(said, list[_Said]), prompt_tokens, int(authority))
        except (ValueError, KeyError):
            read = (self._segment(item, prompt_tokens, authority) for item in said)
            return tuple(segment for segment in read if segment is not None)

    def _segment(self, item: object, prompt_tokens: int, authority: Authority) -> Segment | None:
        if not isinstance(item, dict):
            self._warn("segments", "must hold objects")
            return None
        if not _OF_SEGMENTS.keys() >= item.keys():
            self._warn("an unknown segment key", f"is not one of {', '.join(sorted(_OF_SEGMENTS))}")
        layer, start, end, importance, name, memory, pinned = (
            self._field(f"segments.{key}", item.get(key), read)
            if key in _REQUIRED or item.get(key) is not None
            else None
            for key, read in _OF_SEGMENTS.items()
        )
        if layer is None or start is None or end is None:
            return None
        end = min(end, prompt_tokens)
        if start >= end:
            return None  # outside the prompt, or empty: nothing to say
        return Segment(layer, start, end, importance, name, memory, int(authority), pinned)

    def _field(self, name: str, value: object, read: Callable[[object], T]) -> T | None:
        try:
            return read(value)
        except (ValueError, TypeError) as error:
            self._warn(name, str(error))
            return None

    def _warn(self, field: str, problem: str) -> None:
        message = 'kvgraph: kv_transfer_params["%s"]: %s %s; ignored (said once)'
        self._once.warn(field, message, KEY, field, problem)


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
_OF_A_SESSION: Final = _READERS.keys() - {"tenant"}
_OF_SEGMENTS: Final[dict[str, Callable[[object], Any]]] = {
    "layer": layer_of,
    "start": token_of,
    "end": token_of,
    "importance": importance_of,
    "name": name_of,
    "memory_id": name_of,
    "pinned": lease_of,
}
_REQUIRED: Final = ("layer", "start", "end")
