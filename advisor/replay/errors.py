"""Errors of the replay lab."""

from __future__ import annotations

from ...graph.errors import KvGraphError


class TraceError(KvGraphError):
    """A trace cannot be read; the message names the file, the line and what is wrong."""


class ReplayError(KvGraphError):
    """A replay was asked for something that cannot be; the message says what is allowed."""
