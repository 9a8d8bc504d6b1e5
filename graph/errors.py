"""Every error that kvgraph raises on purpose; those of one room are defined there:
``dashboards.source.BusyError``, ``advisor.tools.remote.RemoteError``."""

from __future__ import annotations


class KvGraphError(Exception):
    """Base of every deliberate kvgraph error."""


class ConfigError(KvGraphError, ValueError):
    """A configuration key or value is wrong; the message names it and what is allowed."""


class WireError(KvGraphError):
    """A frame or message is refused; the message names the field, never its content."""


class VersionError(WireError):
    """A frame carries a protocol version that this build does not speak."""


class GraphError(KvGraphError):
    """A graph operation's arguments make it impossible, such as an unknown block."""


class SnapshotError(KvGraphError):
    """A snapshot could not be written, or is damaged and was not loaded."""


class CompiledPartMissingError(KvGraphError):
    """What makes a graph needs ``kvgraph._graph``, which is not installed here."""
