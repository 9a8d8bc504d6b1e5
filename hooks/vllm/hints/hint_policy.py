"""Whose hints count: what ``AITHER_KVCACHE_HINTS`` lets callers say about sessions and blocks.

A hint is the client's word. ``session`` (the default) takes what a caller says about its sessions,
and keeps sessions of different cache salts apart. ``all`` also takes segments and tenants, which
affect blocks that others share. ``off`` takes nothing from anybody. ``secret:FILE`` takes
everything from requests that carry the file's content, and nothing from others. A request with the
secret speaks for the operator: what it says about blocks holds against callers of all engines that
share a sidecar.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import shlex
import stat
from collections.abc import Mapping
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Final, NamedTuple

from ....graph.errors import ConfigError
from ....graph.types import Authority

logger = logging.getLogger(__name__)

HINTS_VARIABLE: Final = "AITHER_KVCACHE_HINTS"
ALLOWED: Final = "all, session, off, or secret:FILE"
_SECRET: Final = "secret:"
_SHORTEST_SECRET: Final = 16  # characters: chosen, so that nobody finds it by trying


class Trust(Enum):
    """How much of what a request says counts."""

    ALL = "all"
    SESSION = "session"
    OFF = "off"


@dataclass(frozen=True, slots=True)
class HintPolicy:
    """Which requests are trusted, and how far.

    Attributes:
        trust: What a request without a secret may say.
        secret: What makes a request trusted in everything; None if there is no such secret.
    """

    trust: Trust
    secret: str | None = None

    @property
    def name(self) -> str:
        """The policy as it was asked for, without the secret."""
        return self.trust.value if self.secret is None else "secret:…"

    def is_operators(self, presented: object) -> bool:
        """Whether a request that carries ``presented`` as its secret speaks for the operator."""
        if self.secret is None or not isinstance(presented, str):
            return False
        ours, theirs = self.secret.encode(), presented.encode("utf-8", "surrogatepass")
        return hmac.compare_digest(ours, theirs)

    def trust_in(self, authority: Authority) -> Trust:
        """What a request that speaks for ``authority`` may say."""
        return Trust.ALL if authority is Authority.OPERATOR else self.trust


NOBODY: Final = HintPolicy(Trust.OFF)


def read_hint_policy(environment: Mapping[str, str]) -> HintPolicy:
    """The policy that an environment asks for.

    Raises:
        ConfigError: The variable's value is not allowed, or its file cannot be read.
    """
    value = _value(environment)
    if value.startswith(_SECRET):
        return HintPolicy(Trust.OFF, _secret_in(Path(value.removeprefix(_SECRET))))
    try:
        return HintPolicy(Trust(value.lower()))
    except ValueError:
        raise ConfigError(f"{HINTS_VARIABLE}={value!r}; allowed: {ALLOWED}") from None


def hint_policy(environment: Mapping[str, str]) -> HintPolicy:
    """The same, but a mistake leaves a warning, and nobody is trusted.

    A secret that every user of the machine can read leaves a warning too, and is used.
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
    """A secret's file that others than its owner and group can open.

    Attributes:
        problem: Which file, its mode, and who can open it.
        remedy: The command that mends it.
    """

    problem: str
    remedy: str


def exposed_secret(environment: Mapping[str, str]) -> ExposedSecret | None:
    """What is wrong with the mode of the secret's file; None if nothing is, or there is none."""
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
    """Name the tenant of a request as far as the engine knows it: one per cache salt.

    The salt itself is a secret and leaves the engine nowhere.
    """
    if not salt:
        return None
    digest = hashlib.blake2b(
        salt.encode("utf-8", "surrogatepass"), digest_size=12, person=b"kvgraph salt"
    )
    return f"salt-{digest.hexdigest()}"


def _value(environment: Mapping[str, str]) -> str:
    return environment.get(HINTS_VARIABLE, "").strip() or Trust.SESSION.value


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
