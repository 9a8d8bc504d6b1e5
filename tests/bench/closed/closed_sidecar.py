"""What the sidecar of a bench's server counted of requests that were held."""

from __future__ import annotations

import re
from dataclasses import dataclass

import httpx
from kvgraph.graph.wire.endpoints import running_sidecars

from ..errors import ServerError
from ..serving.vllm_server import Server


@dataclass(frozen=True, slots=True)
class HoldCounts:
    """Requests since the engine's start; seconds."""

    held: int
    not_held: int
    longest_s: float
    waited_s: float
    released: dict[str, int]

    @property
    def share(self) -> float:
        """Of all requests, those that were held."""
        return self.held / max(1, self.held + self.not_held)


def hold_counts(server: Server) -> HoldCounts:
    """Asks the sidecar that the server started.

    Raises:
        ServerError: There is none.
    """
    family = server.process_ids()
    own = [sidecar for sidecar in running_sidecars() if sidecar.pid in family]
    if not own:
        raise ServerError("the engine's sidecar is gone; see the server's log")
    page = httpx.get(f"{own[0].http}/metrics", timeout=10.0, trust_env=False)
    return parse_holds(page.text)


def parse_holds(metrics: str) -> HoldCounts:
    """``kvgraph_admission_*`` of a metrics page."""

    def number(name: str) -> float:
        found = re.search(rf"^kvgraph_admission_{name}\{{[^}}]*\}} (\S+)$", metrics, re.M)
        return float(found[1]) if found else 0.0

    ends = re.findall(
        r'^kvgraph_admission_released_total\{[^}]*reason="(\w+)"[^}]*\} (\S+)$', metrics, re.M
    )
    return HoldCounts(
        held=int(number("held_total")),
        not_held=int(number("not_held_total")),
        longest_s=number("longest_seconds"),
        waited_s=number("waited_seconds_total"),
        released={reason: int(float(count)) for reason, count in ends},
    )
