"""Which releases of vLLM were compared with the table of what the hooks rely on, and how."""

from __future__ import annotations

from typing import Final

TESTED: Final = "0.32"  # the tests run with it, and real engines of its CPU build
COMPARED: Final = ("0.31", "0.33")  # names and parameters, in the sources of the release
READ: Final = ("0.31.0", "0.32.0", "0.33.0")  # of which ``conditions.KNOWN`` is the whole list
_FITTING: Final = ", ".join(sorted((TESTED, *COMPARED)))
WHAT_FITS: Final = f"vLLM {_FITTING} fit; tests run with {TESTED}.x"


def is_tested(version: str) -> bool:
    """Whether tests run with this version of vLLM."""
    return _minor(version) == TESTED


def is_known(version: str) -> bool:
    """Whether a release of this minor version was looked through."""
    return is_tested(version) or _minor(version) in COMPARED


def _minor(version: str) -> str:
    return ".".join(version.split(".")[:2])
