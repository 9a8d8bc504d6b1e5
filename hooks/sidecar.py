"""``SidecarChild``: the sidecar that an engine starts for itself, one for all of its processes."""

from __future__ import annotations

import atexit
import contextlib
import fcntl
import json
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import IO, Final

from ..graph.wire.endpoints import MAX_IPC_PATH

_PREFIX: Final = "kvgraph-"
_KEY: Final = "owner"  # locked while the owner lives; a directory without it is left alone
_LONGEST_NAME: Final = len("/kvgraph.sock")


class SocketDirectory:
    """A new directory that only this user can enter (0700), short enough for a socket's path.

    A process that is killed leaves its directory behind. The next process removes it if a lock
    shows that its owner is gone, even if the owner ran in another container.
    """

    def __init__(self) -> None:
        self.path = _new_directory()
        self._key = _locked(self.path)
        _remove_deserted(self.path.parent)

    def close(self) -> None:
        shutil.rmtree(self.path, ignore_errors=True)
        if self._key is not None:
            os.close(self._key)
            self._key = None


def _new_directory() -> Path:
    directory = Path(tempfile.mkdtemp(prefix=_PREFIX))
    if len(str(directory)) + _LONGEST_NAME > MAX_IPC_PATH:
        directory.rmdir()
        directory = Path(tempfile.mkdtemp(prefix=_PREFIX, dir="/tmp"))
    return directory


def _locked(directory: Path) -> int | None:
    """Lock a directory's key before it can be seen; None where there are no locks."""
    unseen = directory / f".{_KEY}"
    key = os.open(unseen, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(key, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(key)
        unseen.unlink()
        return None
    unseen.rename(directory / _KEY)
    return key


def _remove_deserted(root: Path) -> None:
    for key in root.glob(f"{_PREFIX}*/{_KEY}"):
        with contextlib.suppress(OSError):
            if key.parent.stat().st_uid == os.getuid() and _is_free(key):
                shutil.rmtree(key.parent, ignore_errors=True)


def _is_free(key: Path) -> bool:
    file = os.open(key, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return False
    finally:
        os.close(file)
    return True


logger = logging.getLogger(__name__)

NICENESS: Final = 10  # the engine goes first; chosen
MAX_STARTS_PER_MINUTE: Final = 5  # chosen
REST_S: Final = 60.0  # seconds before the next attempt, after dying that often; chosen
_MOST_LINE: Final = 64 << 10  # characters of one line of its output; chosen: lines have hundreds

Command = Callable[[str], Sequence[str]]


def start_child() -> str:
    """Start a supervised sidecar and return its endpoint at once, before it is ready."""
    sidecar = SidecarChild()
    sidecar.start()
    return sidecar.endpoint


def serve_command(endpoint: str) -> list[str]:
    """Return the child's command line; ``-P`` keeps the working directory off its import path."""
    return [
        sys.executable, "-P", "-m", "kvgraph", "serve",
        "--endpoint", endpoint, "--http-port", "0", "--parent", str(os.getpid()),
    ]  # fmt: skip


class SidecarChild:
    """A sidecar as a child process, and the daemon thread that keeps it running."""

    def __init__(
        self,
        command: Command = serve_command,  # makes the child's command line for an endpoint
        clock: Callable[[], float] = time.monotonic,  # monotonic seconds
        # pause before the first restart; doubles with each one within a minute
        backoff_s: float = 0.25,
        rest_s: float = REST_S,  # pause after it died `MAX_STARTS_PER_MINUTE` times in a minute
    ) -> None:
        self._sockets = SocketDirectory()
        self.endpoint = f"ipc://{self._sockets.path}/kvgraph.sock"
        self.gave_up = False
        self._command = command
        self._clock = clock
        self._backoff_s, self._rest_s = backoff_s, rest_s
        self._resting = False
        self._owner = os.getpid()
        self._starts: deque[float] = deque(maxlen=MAX_STARTS_PER_MINUTE)
        self._process: subprocess.Popen[str] | None = None
        self._stopping = threading.Event()
        self._thread = threading.Thread(target=self._supervise, name="kvgraph-sidecar", daemon=True)

    @property
    def pid(self) -> int | None:
        return None if self._process is None else self._process.pid

    def start(self) -> None:
        """Start supervising; returns before the child exists."""
        atexit.register(self.stop)
        self._thread.start()

    def stop(self, timeout_s: float = 2.0) -> None:
        """End the child, by force if it takes longer than ``timeout_s``."""
        if os.getpid() != self._owner:
            return  # a forked copy of the engine is not the one that owns the child
        self._stopping.set()
        atexit.unregister(self.stop)
        if self._process is not None:
            _end(self._process, timeout_s)
        self._thread.join(timeout_s)
        self._sockets.close()

    def _supervise(self) -> None:
        while not self._stopping.is_set():
            self._starts.append(self._clock())
            try:
                self._run_once()
            except (FileNotFoundError, PermissionError) as error:  # nor could it be later
                self.gave_up = True
                logger.warning("kvgraph: the sidecar could not be started: %s", error)
                return
            except Exception as error:  # no descriptor or memory was left, perhaps
                why = getattr(error, "strerror", None) or "while it ran"
                logger.warning(
                    "kvgraph: the sidecar is started again after %s: %s", type(error).__name__, why
                )
                if self._process is not None:
                    _end(self._process, 2.0)
            self._stopping.wait(self._pause_s())

    def _run_once(self) -> None:
        # A session of its own: Ctrl-C is for the engine, which ends the child when it is done.
        self._process = process = subprocess.Popen(
            list(self._command(self.endpoint)),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            start_new_session=True,
        )
        with contextlib.suppress(OSError):  # it may be gone already
            os.setpriority(os.PRIO_PROCESS, process.pid, NICENESS)
        if self._stopping.is_set():
            process.terminate()
        self._read_output(process)
        code = process.wait()
        if not self._stopping.is_set():
            logger.warning("kvgraph: the sidecar ended unexpectedly (exit code %s)", code)

    def _read_output(self, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        with process.stdout:
            for line in _lines(process.stdout):  # to the end: a full pipe would block the child
                ready = _ready_line(line)
                if ready is not None:
                    logger.info(
                        "kvgraph: sidecar (pid %s) listens on %s, dashboard at %s (open it by %s)",
                        process.pid,
                        self.endpoint,
                        ready.get("http"),
                        ready.get("page", "`kvgraph open`"),
                    )

    def _pause_s(self) -> float:
        """Return the seconds until the next start; longer for a child that dies again and again."""
        now = self._clock()
        recent = sum(now - start < 60.0 for start in self._starts)
        if recent < MAX_STARTS_PER_MINUTE:
            self._resting = False
            return float(self._backoff_s * 2**recent)
        if not self._resting and not self._stopping.is_set():
            self._resting = True
            logger.warning(
                "kvgraph: the sidecar ended %d times within a minute; from now on it is started "
                "once a minute, and the engine goes on without advice meanwhile",
                MAX_STARTS_PER_MINUTE,
            )
        return self._rest_s


def _lines(output: IO[str]) -> Iterator[str]:
    """Yield the lines of ``output``, except for those that are longer than ``_MOST_LINE``."""
    begins = True  # whether a line begins here
    while part := output.readline(_MOST_LINE):
        ends = part.endswith("\n")
        if begins and (ends or len(part) < _MOST_LINE):
            yield part
        begins = ends


def _ready_line(line: str) -> dict[str, object] | None:
    try:
        content = json.loads(line)
    except (ValueError, RecursionError):
        return None
    return content if isinstance(content, dict) and content.get("ready") else None


def _end(process: subprocess.Popen[str], timeout_s: float) -> None:
    process.terminate()
    try:
        process.wait(timeout_s)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
