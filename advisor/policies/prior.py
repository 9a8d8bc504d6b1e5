"""What recorded agents teach about sessions in general: where ``LifecyclePolicy`` starts from.

``kvgraph prior`` makes the file from recorded sessions; it holds weights and no traffic.
"""

from __future__ import annotations

from importlib.resources import files
from typing import Final, NamedTuple

import numpy as np

from .hazard import Singles, Weights

FILE: Final = "prior.npz"
_WEIGHTS: Final = ("into", "bias", "across", "offset", "out", "base")


class Prior(NamedTuple):
    """Weights of a ``ReturnModel``, and the traffic's pace that they are for.

    Attributes:
        scales, weights: See ``ReturnModel``.
        pause: The mean of ln(pause / s) over all pauses that ended.
    """

    scales: Singles
    weights: Weights
    pause: float


def load_prior() -> Prior:
    """The prior that ships with the package."""
    with files(__package__).joinpath(FILE).open("rb") as file, np.load(file) as arrays:
        weights = [arrays[name].astype(np.float32) for name in _WEIGHTS]
        return Prior(arrays["scales"], weights, float(arrays["pause"]))


def packed(prior: Prior) -> dict[str, np.ndarray]:
    """The arrays of a prior's file; half precision is finer than what is known."""
    weights = zip(_WEIGHTS, prior.weights, strict=True)
    arrays = {name: weight.astype(np.float16) for name, weight in weights}
    return {"scales": prior.scales, "pause": np.array(prior.pause), **arrays}
