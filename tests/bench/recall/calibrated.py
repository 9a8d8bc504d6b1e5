"""Says of a model that it is calibrated: what a bench measures is not how much a splice changes."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from kvgraph.hooks.recall.cover import SpliceLimits
from kvgraph.hooks.recall.gate import DIRECTORY_VARIABLE, Calibration, calibration_file, save


def keep_calibration(
    model: Any, directory: Path, limits: SpliceLimits, passed: bool = True
) -> None:
    """Let engines with ``model`` find a calibration in ``directory``, from now on in this process.

    Args:
        model: vLLM's configuration of it.
    """
    from kvgraph.hooks.vllm.recall.support import model_identity

    os.environ[DIRECTORY_VARIABLE] = str(directory)
    identity = model_identity(model, model.max_model_len)
    calibration = Calibration("a bench's", identity, passed, "as the bench says", limits)
    save(calibration, calibration_file(identity))
