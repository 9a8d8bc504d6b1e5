"""How long tools take, if callers name them: learned from the pauses that they cause."""

from __future__ import annotations

import math
from collections import Counter, deque
from collections.abc import Callable, Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from ..types import NO_ROW

# All chosen.
A_TENANTS_TOOLS: Final = 64
MOST_TOOLS: Final = 4096
_FEW: Final = 3  # with fewer pauses nothing is known
_TRIALS: Final = 64  # tools at least that have the time to become known
_MEMORY: Final = 50.0  # pauses over which a mean forgets
_KNOWN_WITHIN: Final = math.log(4.0)  # the error that a caller's own statement may have
_LEAST_S: Final = 0.01
_OTHERS: Final = ""


class ToolBook:
    """Tools by tenant and name, with the logarithms of their durations; bounded.

    Beyond ``A_TENANTS_TOOLS``, a tenant's further tools count as one; beyond ``MOST_TOOLS``, one
    of which fewer than ``_FEW`` pauses are known makes room, the oldest first, so that no tenant's
    many take the place of what is known of another's.

    Args:
        forget: Is told of a number that is about to mean another tool.
    """

    def __init__(self, forget: Callable[[int], None] = lambda tool: None) -> None:
        self._forget = forget
        self._names: list[tuple[int, str]] = []  # tenant and name, by number
        self._numbers: dict[tuple[int, str], int] = {}
        self._of_tenant: Counter[int] = Counter()
        self._stats: list[list[float]] = []  # by number: pauses seen, mean, variance
        self._untried: deque[int] = deque()  # the oldest first; some have become known since

    def __len__(self) -> int:
        return len(self._stats)

    @property
    def names(self) -> list[tuple[int, str]]:
        """Tenant and name of each tool, by number."""
        return list(self._names)

    def stats(self) -> npt.NDArray[np.float64]:
        """float64 ``[tools, 3]``: pauses seen, the mean of ln(pause / s), its variance."""
        return np.array(self._stats, dtype=np.float64).reshape(-1, 3)

    def restore(self, names: Sequence[Sequence[int | str]], stats: npt.NDArray[np.float64]) -> None:
        """Fill an empty book with what ``names`` and ``stats()`` gave."""
        for tenant, name in names:
            self._create(int(tenant), str(name))
        self._stats = stats.tolist()

    def number(self, name: str, tenant: int) -> int:
        """The number of the tool of this name, given if it is new."""
        found = self._numbers.get((tenant, name))
        if found is not None:
            return found
        if self._of_tenant[tenant] >= A_TENANTS_TOOLS and name != _OTHERS:
            return self.number(_OTHERS, tenant)
        if len(self) >= MOST_TOOLS:
            return self._replace(self._least_known(), tenant, name)
        return self._create(tenant, name)

    def name(self, tool: int) -> str | None:
        """The tool's name; None for ``NO_ROW``, and for a tenant's further tools."""
        return None if tool == NO_ROW else self._names[tool][1] or None

    def note(self, tool: int, seconds: float) -> None:
        """Note that a session came back from this tool after ``seconds``."""
        seen, mean, variance = self._stats[tool]
        share = 1.0 / min(seen + 1.0, _MEMORY)
        off = math.log(max(seconds, _LEAST_S)) - mean
        self._stats[tool] = [
            seen + 1.0, mean + share * off, (1.0 - share) * (variance + share * off * off)
        ]  # fmt: skip

    def expected_s(self, tool: int) -> float | None:
        """Seconds that the tool usually takes; None if that is not known within a factor of 4."""
        if tool == NO_ROW:
            return None
        seen, mean, variance = self._stats[tool]
        if seen < _FEW or math.sqrt(variance) > _KNOWN_WITHIN:
            return None
        return math.exp(mean)

    def _create(self, tenant: int, name: str) -> int:
        number = len(self._names)
        self._names.append((tenant, name))
        self._numbers[tenant, name] = number
        self._of_tenant[tenant] += 1
        self._stats.append([0.0, 0.0, 0.0])
        self._untried.append(number)
        return number

    def _least_known(self) -> int:
        """The oldest of the tools of which next to nothing is known, where there are many such;
        else the one of the others of which least is."""
        while len(self._untried) > _TRIALS:
            tool = self._untried.popleft()
            if self._stats[tool][0] < _FEW:
                return tool
        untried = set(self._untried)
        known = (tool for tool in range(len(self)) if tool not in untried)
        return min(known, key=lambda tool: self._stats[tool][0])

    def _replace(self, tool: int, tenant: int, name: str) -> int:
        self._forget(tool)
        self._of_tenant[self._names[tool][0]] -= 1
        del self._numbers[self._names[tool]]
        self._names[tool] = tenant, name
        self._numbers[tenant, name] = tool
        self._of_tenant[tenant] += 1
        self._stats[tool] = [0.0, 0.0, 0.0]
        self._untried.append(tool)
        return tool
