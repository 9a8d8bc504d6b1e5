"""What is let in before any of it is looked at: from where, how much, and for how long."""

from __future__ import annotations

from typing import Final

MOST_BODY_BYTES: Final = 2 << 20
"""Of a request's body; chosen: the longest question (256 wishes whose names are all escaped) has
1.2 MB."""
