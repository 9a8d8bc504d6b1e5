"""Every error that kvgraph raises on purpose.

KvGraphError
├── ConfigError      a configuration key or value is wrong
│   └── InUseError     … is right, and cannot be had on this machine now
├── WireError        a frame or message that we refuse
│   └── VersionError   a frame of a protocol version that we do not speak
├── GraphError       a graph operation that its arguments make impossible
├── SnapshotError    a snapshot that cannot be written, or must not be loaded
└── CompiledPartMissingError   kvgraph was installed without its compiled part

Errors of a single module are defined there: ``dashboards.source.BusyError``,
``advisor.remote.RemoteError``.
"""

from __future__ import annotations

from typing import ClassVar


class KvGraphError(Exception):
    """Base of every deliberate kvgraph error.

    Attributes:
        exit_code: Exit code of a command that ends with this error. 2: its input is wrong, so
            retrying is useless; 1: anything else.
    """

    exit_code: ClassVar[int] = 1


class ConfigError(KvGraphError, ValueError):
    """A configuration key or value is wrong; the message names it and what is allowed."""

    exit_code = 2


class InUseError(ConfigError):
    """A value is right, but cannot be had on this machine now: another process has the port."""

    exit_code = 1


class WireError(KvGraphError):
    """A frame or message is refused; the message names the field, never its content."""


class VersionError(WireError):
    """A frame carries a protocol version that this build does not speak."""


class GraphError(KvGraphError):
    """A graph operation's arguments make it impossible, such as an unknown block."""


class SnapshotError(KvGraphError):
    """A snapshot could not be written, or is damaged and was not loaded."""

    exit_code = 2


class CompiledPartMissingError(KvGraphError):
    """Creating a graph needs ``kvgraph._graph``, which is not installed here."""
