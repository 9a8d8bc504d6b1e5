"""The page, at work: recorded agents, an engine without a model, and a sidecar to look at."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from rich.console import Console

from ...dashboards.page_tokens import page_address
from ...graph.messages.events import Segment
from ...graph.types import LAYER_BY_NAME, SourceLayer
from ...hooks.client import ClientOptions
from ...hooks.fake import FakeEngine
from ..faults.processes.faults_http import token_in
from ..recorded.agents_fleet import SESSIONS, USERS, recorded_requests
from ..recorded.agents_requests import AgentRequest
from ..sidecars.sidecar_process import SidecarProcess

POOL: Final = 1_300  # blocks; too few for all of the agents' contexts: chosen
BLOCK: Final = 8  # tokens of the shrunk recordings
REQUESTS: Final = 1_400  # of the fleet, three quarters of an hour; then from the start again
VOCABULARY: Final = 8_000
FASTER: Final = 8.0  # than recorded
LAST_WORDS: Final = 60  # tokens at the end of a prompt that stand for what a user wrote


def run_page() -> None:
    """Play recorded agents until Ctrl-C, and say where to watch."""
    console = Console()
    requests = recorded_requests(SESSIONS, USERS, 3, REQUESTS, VOCABULARY)
    with (
        tempfile.TemporaryDirectory(prefix="kvg-") as folder,
        SidecarProcess(Path(folder), policy__guard="true") as sidecar,
        FakeEngine(sidecar.endpoint, POOL, BLOCK, "demo", ClientOptions(tick_s=0.05)) as engine,
    ):
        address = page_address(sidecar.http, token_in(Path(folder)))
        console.print(f"watch it at {address}", soft_wrap=True)
        console.print(f"{USERS} recorded agents, {FASTER:.0f} times as fast; Ctrl-C ends it")
        for lap in itertools.count():
            _play(engine, requests, lap)


def _play(engine: FakeEngine, requests: tuple[AgentRequest, ...], lap: int) -> None:
    began = time.monotonic()
    for each in requests:
        time.sleep(max(0.0, began + each.at / FASTER - time.monotonic()))
        if len(each.prompt) // BLOCK < POOL:
            session = f"{each.session}-{lap}"
            segments = tuple(_segments(each))
            engine.run(each.prompt, session, None, segments, each.waiting, each.ended)


def _segments(request: AgentRequest) -> Iterator[Segment]:
    """The head as it was recorded; behind it what tools said, and the user's last words."""
    end = 0
    for layer, start, end in request.layers:
        yield Segment(int(LAYER_BY_NAME[layer]), start, end)
    words = max(end, len(request.prompt) - LAST_WORDS)
    if words > end:
        yield Segment(int(SourceLayer.TOOL_RESULT), end, words)
    yield Segment(int(SourceLayer.USER_TURN), words, len(request.prompt))
