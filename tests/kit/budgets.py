"""How much of a property is tried before a commit, and how much in the whole suite."""

from __future__ import annotations

from typing import Any

import pytest


def small_or_large(small: Any, large: Any) -> list[Any]:
    return [
        pytest.param(small, id="small"),
        pytest.param(large, id="large", marks=pytest.mark.large),
    ]
