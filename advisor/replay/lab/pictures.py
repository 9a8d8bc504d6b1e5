"""Imports matplotlib when a picture is wanted; opens no display."""

from __future__ import annotations

from typing import Any

from ..errors import ReplayError


def pyplot() -> Any:
    """``matplotlib.pyplot``, drawing into files.

    Raises:
        ReplayError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError:
        raise ReplayError("the picture needs matplotlib: pip install 'kvgraph[replay]'") from None
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot
