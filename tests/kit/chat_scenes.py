"""What a client of a chat says."""

from __future__ import annotations

from typing import Any


def user(text: str) -> dict[str, Any]:
    """A message of the client's."""
    return {"role": "user", "content": text}
