"""Fixtures that several test files share."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import tempfile
import threading
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import zmq
from kvgraph.graph.wire import frames as wire
from kvgraph.graph.wire.advice import AnyAdvice
from kvgraph.graph.wire.events import AnyEvent
from kvgraph.hooks.vllm.patching import restored
from vllm_forks import VllmForks
from waiting import PATIENCE_S, until

pytest.register_assert_rewrite("pool_engine")
pytest_plugins = ["small_world", "page_browser", "page_sidecar"]


@pytest.fixture
def anyio_backend() -> str:
    """The loop of tests that are coroutines."""
    return "asyncio"


NEEDS = {"new_engine": "engine", "chromium": "browser"}
"""Markers of what a fixture needs: no test that asks for it can lack one."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        for fixture in NEEDS.keys() & set(getattr(item, "fixturenames", ())):
            item.add_marker(NEEDS[fixture])


@pytest.fixture(autouse=True, scope="session")
def _only_what_tests_start() -> Iterator[None]:
    """Another vLLM plugin that answers to the same switch stays out.

    Engines believe what tests say of their requests, and a policy ranks from the start, unless a
    test is about that. Sidecars of another worker, or of whoever runs the tests, are not found.
    """
    with (
        pytest.MonkeyPatch.context() as patch,
        # Short: paths of ipc sockets have 107 bytes.
        tempfile.TemporaryDirectory(prefix="kvg-", ignore_cleanup_errors=True) as runtime,
    ):
        patch.setenv("XDG_RUNTIME_DIR", runtime)
        patch.setenv("VLLM_PLUGINS", "kvgraph")
        patch.setenv("AITHER_KVCACHE_HINTS", "all")
        patch.setenv("KVGRAPH_POLICY__GUARD", "false")
        yield


@pytest.fixture(autouse=True)
def _vllm_as_it_was(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """No test patches vLLM's classes for the next of its worker; ours go before a test's own."""
    with restored():
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
        while self._socket.poll(round(wait_s * 1000), zmq.POLLIN):
            identity, *frames = self._socket.recv_multipart()
            if identity not in self.peers:
                self.peers.append(identity)
            message = wire.decode_events(frames)
            assert not message.refused, message.refused
            self.batches.append((message.seq, message.events))
            wait_s = 0.0

    def read_until(self, done: Callable[[], object], timeout_s: float = PATIENCE_S) -> None:
        def arrived() -> object:
            self.read()
            return done()

        until(arrived, "what was awaited did not arrive", timeout_s)

    def has(self, kind: type) -> bool:
        return any(isinstance(event, kind) for event in self.events)

    def advise(self, advice: AnyAdvice, seq: int = 0) -> None:
        self.send_frames(wire.encode_advice(seq, advice, now=0.0))

    def send_frames(self, frames: list[bytes]) -> None:
        self._socket.send_multipart([self.peers[-1], *frames])

    def close(self) -> None:
        self._socket.close(linger=0)
        self._context.term()


@dataclass
class EngineRun:
    """What one engine did: the JSON after ``RESULT``, and all that it printed."""

    result: Any
    log: str

    def lines(self, text: str) -> list[str]:
        return [line for line in self.log.splitlines() if text in line]


class EngineProcess:
    """A running script of ``engine/programs`` with an engine; ``env``: variables beside ours."""

    def __init__(
        self, forks: VllmForks, script: str, options: dict[str, Any], env: dict[str, str]
    ) -> None:
        self._process = forks.start(PROGRAMS / script, json.dumps(options), engine_env() | env)
        self.kill = self._process.kill
        self._output: list[str] = []
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    @property
    def running(self) -> bool:
        return self._process.poll() is None

    def run(self, timeout_s: float = 300.0) -> EngineRun:
        try:
            code = self._process.wait(timeout_s)
        finally:
            self.kill()
        self._reader.join(10)
        log = "".join(self._output)
        assert code == 0, log[-6000:]
        match = re.search(r"^RESULT (.*)$", log, re.MULTILINE)
        assert match, log[-6000:]
        return EngineRun(json.loads(match[1]), log)

    def _read(self) -> None:
        with self._process.stdout as stdout:
            self._output.extend(stdout)


PROGRAMS = Path(__file__).parent / "engine" / "programs"


def engine_env() -> dict[str, str]:
    """The variables of an engine that a test sets none for: of ``AITHER_…`` none is handed on."""
    inherited = {k: v for k, v in os.environ.items() if not k.startswith("AITHER_")}
    return inherited | {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_LOGGING_COLOR": "0",
        "AITHER_KVCACHE_HINTS": "all",
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": str(PROGRAMS),
    }


@pytest.fixture(scope="session")
def new_engine() -> Iterator[Callable[..., EngineProcess]]:
    """Starts an ``EngineProcess``; what a failed test left running is killed at the end."""
    with contextlib.ExitStack() as stack:
        forks = stack.enter_context(contextlib.closing(VllmForks(engine_env())))

        def start(script: str, options: dict[str, Any], **env: str) -> EngineProcess:
            engine = EngineProcess(forks, script, options, env)
            stack.callback(engine.kill)
            return engine

        yield start


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
    from kvgraph_bench.serving.model import TINY, ensure_model

    return ensure_model(TINY, tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="session")
def paper_config(vllm_loaded: None, tiny_model: Path) -> Any:
    """vLLM's configuration for engines on paper."""
    from kvgraph_bench.paper.paper_engine import base_config

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return base_config(tiny_model)


@pytest.fixture
def paper(paper_config: Any) -> Iterator[Callable[..., Any]]:
    """Makes a ``PaperEngine`` of a shape; what it started is ended after the test."""
    from kvgraph_bench.paper.paper_engine import PaperEngine

    with contextlib.ExitStack() as stack:

        def new(*args: Any, **fields: Any) -> Any:
            return stack.enter_context(
                contextlib.closing(PaperEngine(paper_config, *args, **fields))
            )

        yield new


@pytest.fixture
def recalls(
    paper: Callable[..., Any], paper_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., Any]:
    """Makes a ``PaperEngine`` with a calibrated model; ``shared``: text that nobody names is."""
    from kvgraph.hooks.recall.gate import DIRECTORY_VARIABLE
    from kvgraph_bench.recall.approximate import keep_calibration, recalling

    def new(shape: Any, limits: Any, shared: str = "1") -> Any:
        monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
        monkeypatch.setenv("AITHER_KVCACHE_RECALL_SHARED", shared)
        keep_calibration(paper_config.model_config, tmp_path, limits)
        return recalling(paper(shape))

    return new
