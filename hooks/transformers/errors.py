"""What the cache for transformers refuses, and why.

ConfKVError
├── SettingsError     a setting has no sense; names it, its value and what is allowed
└── UnsupportedError  a model, an engine or a call that the cache cannot serve; names it
"""

from __future__ import annotations

from ...graph.errors import KvGraphError


class ConfKVError(KvGraphError):
    """Base of every deliberate error of ``ConfKVCache``."""


class SettingsError(ConfKVError, ValueError):
    """A setting has a value that makes no sense; the message says what is allowed."""


class UnsupportedError(ConfKVError):
    """A model, a way to run it or a call that the cache cannot serve; the message names it."""
