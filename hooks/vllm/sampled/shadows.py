"""Attributes of vLLM's objects that stand before their methods for a while."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


class Shadows:
    """Shadows methods of objects, never of classes, and takes all shadows away at once."""

    def __init__(self) -> None:
        self._laid: list[tuple[Any, str]] = []

    def lay(self, owner: Any, name: str, shadow: Callable[..., Any]) -> None:
        """Have ``owner.name(…)`` call ``shadow(original, …)`` from now on."""
        original = getattr(owner, name)
        self._laid.append((owner, name))
        setattr(owner, name, functools.partial(shadow, original))

    def lift(self) -> None:
        """Leave the objects as they were."""
        for owner, name in self._laid:
            vars(owner).pop(name, None)
        self._laid.clear()

    def __len__(self) -> int:
        return len(self._laid)
