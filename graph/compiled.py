"""The graph's compiled loops, ``kvgraph._graph``, or a stand-in that raises an error naming it."""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn

from .errors import CompiledPartMissingError

if TYPE_CHECKING:
    from .. import _graph as core
else:
    try:
        from .. import _graph as core
    except ImportError as error:
        _WHY = str(error)

        class _Missing:
            """Raises when a compiled loop is used; code that uses none still works."""

            def __getattr__(self, name: str) -> NoReturn:
                raise CompiledPartMissingError(
                    "a sidecar, the replay lab and whoever else makes a KVCacheGraph need the "
                    "compiled part of kvgraph (kvgraph._graph), which is not installed here; "
                    "install a wheel of kvgraph that was built for this Python and platform, or a "
                    "C++ compiler (on Debian: apt-get install g++) and then kvgraph once more. "
                    f"An engine needs none of it. ({_WHY})"
                )

        core = _Missing()


def require_compiled() -> None:
    """Raise CompiledPartMissingError now, not at the first event, if the core is missing."""
    _ = core.find


__all__ = ["core", "require_compiled"]
