"""Fixtures that several test files share."""

from __future__ import annotations

import contextlib
import shutil
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import zmq
from kvgraph.graph import wire
from kvgraph.graph.advice import AnyAdvice
from kvgraph.graph.events import AnyEvent


@pytest.fixture(autouse=True, scope="session")
def _only_our_vllm_plugin() -> Iterator[None]:
    """The peer that benches compare with is a vLLM plugin too, and answers to the same switch."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("VLLM_PLUGINS", "kvgraph")
        yield


class RouterEnd:
    """A sidecar's socket and nothing behind it: keeps what it is told, says what a test wants."""

    def __init__(self, endpoint: str) -> None:
        self.endpoint = endpoint
        self.batches: list[tuple[int, list[AnyEvent]]] = []
        self.peers: list[bytes] = []
        self._context = zmq.Context()
        self._socket = self._context.socket(zmq.ROUTER)
        self._socket.setsockopt(zmq.LINGER, 0)
        self._socket.bind(endpoint)

    @property
    def events(self) -> list[AnyEvent]:
        return [event for _, events in self.batches for event in events]

    def read(self, wait_s: float = 0.0) -> None:
        """Take in what is there, waiting up to ``wait_s`` for the first message."""
        while self._socket.poll(round(wait_s * 1000), zmq.POLLIN):
            identity, *frames = self._socket.recv_multipart()
            if identity not in self.peers:
                self.peers.append(identity)
            self.batches.append(wire.decode_events(frames))
            wait_s = 0.0

    def read_until(self, done: Callable[[], object], timeout_s: float = 10.0) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            assert time.monotonic() < deadline, "what was awaited did not arrive"
            self.read(0.02)

    def has(self, kind: type) -> bool:
        return any(isinstance(event, kind) for event in self.events)

    def advise(self, advice: AnyAdvice, seq: int = 0) -> None:
        self.send_frames(wire.encode_advice(seq, advice))

    def send_frames(self, frames: list[bytes]) -> None:
        self._socket.send_multipart([self.peers[-1], *frames])

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


@pytest.fixture
def socket_directory() -> Iterator[Path]:
    """A directory with a path short enough for ipc sockets."""
    directory = Path(tempfile.mkdtemp(prefix="kvg-"))
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def new_router() -> Iterator[Callable[[str], RouterEnd]]:
    """Opens a ``RouterEnd`` at an endpoint, and closes it after the test."""
    with contextlib.ExitStack() as stack:

        def open_at(endpoint: str) -> RouterEnd:
            return stack.enter_context(contextlib.closing(RouterEnd(endpoint)))

        yield open_at


@pytest.fixture
def router(socket_directory: Path, new_router: Callable[[str], RouterEnd]) -> RouterEnd:
    return new_router(f"ipc://{socket_directory}/s")


@pytest.fixture(scope="session")
def vllm_loaded() -> None:
    """Import vLLM once, without its own deprecation warnings becoming our errors."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import vllm
        import vllm.config
        import vllm.engine.arg_utils
        import vllm.v1.core.block_pool
        import vllm.v1.request  # noqa: F401


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random two-layer Llama with its tokenizer, written once a session."""
    from kvgraph.bench.model import TINY, ensure_model

    return ensure_model(TINY, tmp_path_factory.mktemp("model") / "tiny")
