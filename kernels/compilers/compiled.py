"""Where compiled kernels are kept: a cache directory outside the package, filled under a lock.

``AITHER_KVCACHE_KERNEL_CACHE`` names the directory; else it is below the user's cache directory.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final

from ..errors import BuildError

CACHE_ENV: Final = "AITHER_KVCACHE_KERNEL_CACHE"


def cache_directory() -> Path:
    """The directory of compiled kernels; it need not exist yet."""
    chosen = os.environ.get(CACHE_ENV)
    if chosen:
        return Path(chosen)
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return root / "kvgraph" / "kernels"


def compiled(name: str, ingredients: list[str], build: Callable[[Path], None]) -> Path:
    """The file that ``build`` makes from ``ingredients``, made once a machine.

    Args:
        name: File name, to which a digest of the ingredients is added.
        ingredients: Everything that the result depends on: sources, options, compiler, processor.
        build: Writes the result to the path that it is given.

    Raises:
        BuildError: The directory cannot be written, or what ``build`` raises.
    """
    digest = hashlib.sha256("\0".join(ingredients).encode()).hexdigest()[:16]
    stem, dot, suffix = name.partition(".")
    path = cache_directory() / f"{stem}-{digest}{dot}{suffix}"
    if path.exists():
        return path
    try:
        path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        with _locked(path.with_suffix(".lock")):
            if not path.exists():  # another process may have been first
                _build_beside(path, build)
    except OSError as error:
        raise BuildError(
            f"compiled kernels cannot be kept in {path.parent}: {error.strerror}; "
            f"set {CACHE_ENV} to a directory that can be written"
        ) from error
    return path


def _build_beside(path: Path, build: Callable[[Path], None]) -> None:
    """A half-written file must never be loaded: build elsewhere, then rename."""
    with tempfile.TemporaryDirectory(dir=path.parent, prefix=".build-") as scratch:
        made = Path(scratch) / path.name
        build(made)
        made.replace(path)


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    with path.open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield
