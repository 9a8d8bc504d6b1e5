"""``kvgraph top``: one look in a pipe, and a live screen in a real terminal."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import pty
import select
import signal
import struct
import subprocess
import sys
import termios
import time
from collections.abc import Iterator
from typing import Any

import pytest
from command_line import kvgraph
from kvgraph.advisor.tools.terminal import hashing_warnings, status_report
from kvgraph.advisor.tools.top import Watched, next_look, shade, top_screen
from kvgraph.graph.wire.events import TierReport
from msgspec.structs import fields
from page_sidecar import TOKEN, PageSidecar
from rich.console import Console

ENVIRONMENT = {**os.environ, "KVGRAPH_SIDECAR__TOKEN": TOKEN, "TERM": "xterm", "COLUMNS": "100"}


def command(*arguments: str) -> list[str]:
    return [sys.executable, "-P", "-m", "kvgraph", "top", *arguments]


def window(asked: int) -> dict[str, Any]:
    return {
        "seconds": 600.0, "requests": 12, "asked": asked, "pool": 700, "loaded": 50,
        "prefetched": 50, "computed": asked and 200, "lru": 600, "saved_s": 4.0,
        "saved_beside_lru_s": 1.0,
    }  # fmt: skip


def now(engine: str = "host:1") -> dict[str, Any]:
    return {
        "at": 1e9,
        "verdict": "80% of the prompt tokens were found",
        "windows": [window(0), window(1000)],
        "history": {"step_s": 10.0, "asked": [0, 100, 100], "computed": [0, 100, 0]},
        "pools": [
            {"engine": "e", "name": engine, "blocks": 200, "cached": 100, "protected": 7,
             "protection": "protected: 7 blocks",
             "layers": {"rules": 0, "context": 100}, "states": {"idle": 100}}
        ],
        "tiers": [{"engine": "e", "tier": "warm", "blocks": 5, "capacity": 10, "bytes": 10**9}],
        "advice": [{"engine": "e", "age_s": 0.3, "epoch": 4, "ranked_by": "lifecycle"}],
        "rooms": [{"engine": "e", "sentence": "2 requests wait for room"}],
        "attention": [
            {"level": "serious", "text": "drops [red]rise[/red]", "engine": None, "view": None}
        ],
    }  # fmt: skip


MISSES = {
    "totals": {"evicted": {"requests": 3, "blocks": 40}, "reset": {"requests": 0, "blocks": 0}}
}


def printed(what: Any, width: int) -> str:
    console = Console(width=width, color_system=None)
    with console.capture() as capture:
        console.print(what)
    return capture.get()


def drawn(watched: Watched, width: int) -> str:
    return printed(top_screen([watched]), width)


@pytest.mark.parametrize("width", [80, 160])
def test_every_width_tells_the_same(width: int) -> None:
    name = "a-node-with-a-long-name:41000 [bold]"
    said = drawn(Watched("http://127.0.0.1:1", now(name), MISSES), width)
    assert max(len(line) for line in said.splitlines()) <= width
    kept = "".join(c for c in said if c not in " \n│┃┌┐└┘├┤─━┏┓┗┛╇┡┩")
    for fact in (
        name, "80%oftheprompt", "80.0%", "70.0%", "100of200", "5of10", "lifecycle;adviceis0.3s",
        "Tokensareofprompts,andsharesareofthese.", "40blocks",
        "2requestswaitforroom", "drops[red]rise[/red]",
    ):  # fmt: skip
        assert fact.replace(" ", "") in kept, fact


def test_who_does_not_answer_is_shown_as_it_was() -> None:
    said = drawn(Watched("http://x", now(), MISSES, "no sidecar answers"), 80)
    assert "! no sidecar answers" in said
    assert "host:1" in said
    assert "! gone" in drawn(Watched("http://x", trouble="gone"), 80)


def test_an_answer_that_no_sidecar_gives_ends_no_watch(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([RecursionError, KeyError, None])

    def ask(url: str, path: str) -> dict[str, Any]:
        if (error := next(answers, None)) is not None:
            raise error
        return now() if path == "/v1/now" else MISSES

    monkeypatch.setattr("kvgraph.advisor.tools.top.ask", ask)
    monkeypatch.setattr("kvgraph.advisor.tools.top.sidecar_urls", lambda url: ["http://x"])
    seen = [Watched("http://x")]
    for _ in range(2):
        seen = next_look("http://x", seen, anew=True)
        assert seen[0].now is None
    assert next_look("http://x", seen, anew=True)[0].now is not None


def test_a_notice_names_its_engine_once() -> None:
    notice = {"level": "info", "text": "host:1: it waits", "engine": "e-1f3a", "view": "engines"}
    said = drawn(Watched("http://x", {**now(), "attention": [notice]}, MISSES), 80)
    assert "info: host:1: it waits" in said
    assert "e-1f3a" not in said


def test_the_fuller_the_larger() -> None:
    assert [shade(share) for share in (0.0, 0.5, 1.0)] == ["▁", "▄", "█"]


def test_a_pipe_gets_one_look(busy_sidecar: PageSidecar) -> None:
    for arguments in ((), ("--json",)):
        done = kvgraph("top", "--url", busy_sidecar.url, *arguments, environment=ENVIRONMENT)
        assert done.returncode == 0, done.stderr
        assert "engine-one" in done.stdout
        assert "\x1b" not in done.stdout
    (look,) = json.loads(done.stdout)
    assert look["now"]["pools"][0]["blocks"] == 159
    assert look["misses"]["totals"]


def test_nobody_there_is_one_line() -> None:
    done = kvgraph("top", "--url", "http://127.0.0.1:1", environment=ENVIRONMENT)
    assert (done.returncode, done.stdout) == (1, "")
    assert done.stderr.startswith("kvgraph: no sidecar answers at http://127.0.0.1:1")


HOME = "\x1b[H"  # begins each frame


def _heed_interrupts() -> None:
    """A shell that started the tests in the background had them ignore Ctrl-C."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)


class Terminal:
    """A pseudo-terminal with ``kvgraph top`` in it."""

    def __init__(self, url: str) -> None:
        self._number, inside = pty.openpty()
        fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 50, 100, 0, 0))
        environment = {name: value for name, value in ENVIRONMENT.items() if name != "COLUMNS"}
        self.process = subprocess.Popen(
            command("--url", url, "--interval", "0.2"),
            env=environment, stdin=inside, stdout=inside, stderr=inside, start_new_session=True,
            preexec_fn=_heed_interrupts,
        )  # fmt: skip
        self._inside = inside
        self._shown = ""

    def await_frame(self, text: str, without: str = "\0", timeout_s: float = 60) -> None:
        deadline, frame = time.monotonic() + timeout_s, ""
        while text not in frame or without in frame:
            assert time.monotonic() < deadline, f"{text!r} is not in {frame!r}"
            if select.select([self._number], [], [], 0.2)[0]:
                self._shown += os.read(self._number, 65536).decode(errors="replace")
            frame = self._shown.split(HOME)[-2] if self._shown.count(HOME) > 1 else ""

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait(20)
        for number in (self._number, self._inside):
            with contextlib.suppress(OSError):
                os.close(number)


@pytest.fixture
def terminal(page_sidecar: PageSidecar) -> Iterator[Terminal]:
    opened = Terminal(page_sidecar.url)
    yield opened
    opened.close()


def test_it_lives_through_a_restart_and_ctrl_c_ends_it(
    page_sidecar: PageSidecar, terminal: Terminal
) -> None:
    terminal.await_frame("No request was seen yet", without="no sidecar answers")
    page_sidecar.stop()
    terminal.await_frame("no sidecar answers")
    page_sidecar.start()
    terminal.await_frame("No request was seen yet", without="no sidecar answers")
    terminal.process.send_signal(signal.SIGINT)
    assert terminal.process.wait(20) == 0


def engine(number: int) -> dict[str, Any]:
    """An engine as in ``/status``; its name differs from others' at the very end."""
    return {
        "name": f"node-with-a-long-name-17.rack.example:41000 rank {number}",
        "model": "meta-llama/Meta-Llama-3.1-70B-Instruct",
        "state": "synced",
        "ruling": {"policy_rules": True, "ahead": 12345.0},
        "ranked_by": "lifecycle",
        "ranking_age_s": 0.31,
        "gaps": 3,
        "hashing": f"blocks of 16 tokens, sha256 {number}",
        "room": None,
        "tiers": None,
        "graph": {
            "resident": 235_123,
            "applied": {"moved": 123_456, "dropped": 12},
        },
    }


def shown(engines: list[dict[str, Any]], width: int, counters: dict[str, int] | None = None) -> str:
    status = {
        "version": "1", "pid": 7, "http": "http://127.0.0.1:8420", "endpoint": "ipc:///x",
        "graph": {"blocks": 1, "bytes": 1, "edges": {}, "sessions": {}, "counters": counters or {}},
        "counters": {"ingest": {}}, "snapshot": {"error": None}, "config": {"error": None},
        "engines": engines,
    }  # fmt: skip
    return printed(status_report(status), width)


@pytest.mark.parametrize("engines", [1, 3, 7])
@pytest.mark.parametrize("width", [80, 120, 200])
def test_no_name_is_cut(engines: int, width: int) -> None:
    text = shown([engine(number) for number in range(engines)], width)
    assert "…" not in text
    assert all(len(line) <= width for line in text.splitlines())
    rows = [line.split("│")[1:3] for line in text.splitlines() if line.startswith("│")]
    names, told = ("".join(cells).replace(" ", "") for cells in zip(*rows, strict=True))
    for number in range(engines):
        assert engine(number)["name"].replace(" ", "") in names
        assert f"blocksof16tokens,sha256{number}" in told
    assert "235123blocks;moved123456,dropped12,gaps3" in told
    assert "rankedbylifecycle(policy12,345blocksaheadofLRU),0.31sago" in told


def test_without_engines() -> None:
    assert "no engine is connected" in shown([], 80)


def test_a_speed_that_nothing_was_measured_of_is_not_shown() -> None:
    tiers = {each.name: 0 for each in fields(TierReport)} | {"loaded": 29, "spilled": 70}
    alone = engine(0) | {"tiers": tiers | {"spill_bytes_per_s": 2e9}}
    alone["graph"]["pressure"] = None
    text = shown([alone], 120)
    assert "29 blocks, 0.0 MB " in text
    assert "70 blocks, 0.0 MB, at 2.00 GB/s" in text


@pytest.mark.parametrize(("reads", "left"), [(True, False), (False, True)])
def test_what_a_shared_store_did_is_told_where_there_is_one(reads: bool, left: bool) -> None:
    alone = engine(0) | {"tiers": {each.name: 0 for each in fields(TierReport)}}
    alone["graph"]["pressure"] = None
    assert "shared store" not in shown([alone], 120)
    alone["tiers"] |= {"reads_store": reads, "shared": 1234, "store_loaded": 56}
    said = " ".join(shown([alone], 200).split())
    assert "1,234 blocks given (0 failed), 56 loaded (0 promised and not given)" in said
    assert ("until the engine is started again" in said) is left


def test_how_blocks_are_told_apart_is_shown_and_compared_across_sidecars() -> None:
    engines = [engine(0), engine(1)]
    assert "blocks of 16 tokens, sha256 1" in shown(engines, 200)
    (said,) = hashing_warnings(engines)
    assert "Meta-Llama-3.1-70B-Instruct' hash blocks differently" in said
    assert hashing_warnings([engine(1), engine(1)]) == []


def test_what_recall_brought_back_is_told_once_there_is_any() -> None:
    assert "recall" not in shown([engine(0)], 120)
    text = shown([engine(0)], 120, {"requests_spliced": 12, "tokens_spliced": 34_567})
    assert "34,567 tokens came back at other positions, in 12 requests" in text
