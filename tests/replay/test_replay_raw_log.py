"""The raw log: what engines said, word for word."""

from __future__ import annotations

import gzip
import json
import resource
from pathlib import Path

import pytest
from kvgraph.advisor.replay.recorder import RawLog, read_raw_log
from kvgraph.advisor.replay.trace import TraceError
from kvgraph.graph.wire.events import (
    AdmissionReport,
    AnyEvent,
    BlocksCleared,
    BlocksEmbedded,
    BlocksRemoved,
    BlocksResident,
    BlocksStored,
    EngineHello,
    Pressure,
    RequestStarted,
    Segment,
    SessionSignal,
)
from wire_keys import pack


@pytest.mark.parametrize("name", ["log.jsonl", "log.jsonl.gz"])
def test_every_event_is_a_line_in_its_order(tmp_path: Path, name: str) -> None:
    path, now = tmp_path / name, [5.0]
    log = RawLog(path, clock=lambda: now[0])
    segments = (Segment(2, 0, 16, name="policy.md"),)
    now[0] = 6.5
    log("e1", [RequestStarted("r", pack(1, (1 << 64) - 1), 40, 16, 16, "s", "t", segments, 16)])
    log("e2", [BlocksRemoved(pack(7)), BlocksEmbedded(pack(1), 2, b"\0" * 4), Pressure(*[1] * 5)])
    log.close()
    read = path.read_bytes()
    text = (gzip.decompress(read) if path.suffix == ".gz" else read).decode()
    first, second, third = map(json.loads, text.splitlines())
    assert (first["at"], first["engine"], first["event"]) == (1.5, "e1", "RequestStarted")
    assert first["hashes"] == [f"{1:#018x}", "0xffffffffffffffff"]
    assert (first["loading_tokens"], first["session"], first["tenant"]) == (16, "s", "t")
    assert (second["event"], second["hashes"]) == ("BlocksRemoved", [f"{7:#018x}"])
    assert third["event"] == "Pressure"
    assert log.events == 3


def test_what_is_read_back_is_what_was_said(tmp_path: Path) -> None:
    path, now = tmp_path / "log.jsonl", [5.0]
    log = RawLog(path, clock=lambda: now[0])
    segments = (Segment(2, 0, 16, name="policy.md"), Segment(7, 16, 40, importance=0.5))
    first: list[AnyEvent] = [
        EngineHello("host:1 said", "model", 16, 100, "vllm"),
        BlocksResident(b""),
        BlocksStored(pack(1, (1 << 64) - 1), None, 16, "s"),
        RequestStarted("r", pack(1), 40, 16, 16, "s", "t", segments, 16),
        SessionSignal("s", "t", True, 1.5, False, "bash"),
    ]
    second: list[AnyEvent] = [BlocksCleared(), AdmissionReport(1, 2, 3.0, 4, (5, 6), 7.0, 8.0, 9)]
    log("e1", first)
    log("e2", [])
    log("e2", second)
    now[0] = 7.5
    log("e2", second)
    log.close()
    assert list(read_raw_log(path)) == [
        (0.0, "e1", first), (0.0, "e2", second), (2.5, "e2", second),
    ]  # fmt: skip


@pytest.mark.parametrize("name", ["log.jsonl", "log.jsonl.gz"])
def test_a_full_disk_ends_the_log_and_not_the_sidecar(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str
) -> None:
    log = RawLog(tmp_path / name)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    log("e", [BlocksRemoved(pack(7))])
    resource.setrlimit(resource.RLIMIT_FSIZE, (0, before[1]))  # no file may grow any more
    try:
        log.close()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    assert f"the log is cut short: {tmp_path / name}" in caplog.text


def test_a_file_that_exists_is_not_written_over(tmp_path: Path) -> None:
    path = tmp_path / "log.jsonl"
    path.write_text("mine")
    with pytest.raises(TraceError, match="cannot be written"):
        RawLog(path)
