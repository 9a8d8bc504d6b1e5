"""Judges whether text can come back at other positions: the switch, tiers, calibrations."""

from __future__ import annotations

import os
from typing import Any, Final

from ...graph.errors import ConfigError
from ...kernels.errors import KernelError
from ..recall.gate import calibration_file, kept_calibrations
from ..tiers.budget import WARM_VARIABLE, read_settings
from ..vllm.settings import OFF, ON, RECALL_SHARED_VARIABLE, RECALL_VARIABLE, recall_is_shared
from .environment import CORRECT, Check

_CALIBRATE: Final = "kvgraph calibrate MODEL"
_NAMED: Final = 4  # models; chosen


def check_recall() -> Check:
    """Whose text may come back at another position, and which models are calibrated."""
    value = _said()
    if value and value not in (*ON, *OFF):
        detail = f"{RECALL_VARIABLE}={value!r} is taken as unset; allowed: 1, 0, or unset"
        return Check("recall", False, detail, CORRECT)
    if value in OFF:
        return Check("recall", None, f"off by {RECALL_VARIABLE}")
    whose = "for every request" if value else "for requests that ask"
    if recall_is_shared():
        whose += f", all of one domain but for salts and tenants ({RECALL_SHARED_VARIABLE})"
    passed, told = _models()
    if not _has_tiers():
        detail = f"{whose}, but there are no tiers to read copies from; {told}"
        return Check("recall", False if value else None, detail, f"set {WARM_VARIABLE}=GiB")
    if not passed:
        return Check("recall", False if value else None, f"{whose}; {told}", _CALIBRATE)
    return Check("recall", True if value else None, f"{whose}; {told}")


def recall_of(config: Any) -> str:
    """Whether an engine of this ``VllmConfig`` can have recall: the end of a sentence."""
    from ..vllm.recall.recall_support import calibration_for

    if _said() in OFF:
        return ""
    try:
        return f"; recall: {calibration_for(config).reason}"
    except (ConfigError, KernelError) as error:
        return f"; no recall: {error}"


def _said() -> str:
    return os.environ.get(RECALL_VARIABLE, "").strip().lower()


def _models() -> tuple[int, str]:
    """How many models passed their calibration; who did and who did not, in words."""
    directory = calibration_file("").parent
    kept = kept_calibrations(directory)
    passed = [each.model for each in kept if each.passed]
    failed = [f"{each.model} ({each.reason})" for each in kept if not each.passed]
    parts = [f"passed: {_list(passed)}"] if passed else []
    parts += [f"did not pass: {_list(failed)}"] if failed else []
    return len(passed), f"{'; '.join(parts) or 'no calibrated model'} (in {directory})"


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _has_tiers() -> bool:
    try:
        return read_settings(os.environ) is not None
    except ConfigError:
        return False
