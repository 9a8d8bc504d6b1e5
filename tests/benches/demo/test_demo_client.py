"""The client of demo and benches, against a server that hangs up."""

from __future__ import annotations

import asyncio
import socketserver
import threading
from collections.abc import Iterator

import pytest
from kvgraph_bench.errors import CompletionError
from kvgraph_bench.serving.passes import all_at_once, one_at_a_time
from kvgraph_bench.tiers.tiers_workload import build_tier_workload, chats, paced


@pytest.fixture
def hanging_up() -> Iterator[str]:
    """A server that reads a little and closes every connection."""

    class HangUp(socketserver.BaseRequestHandler):
        def handle(self) -> None:
            self.request.recv(1024)

    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), HangUp) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()


@pytest.mark.parametrize("how", [one_at_a_time, all_at_once])
def test_a_lost_request_ends_the_pass_and_is_named(hanging_up: str, how: object) -> None:
    workload = paced(chats(build_tier_workload(2048), 2), 0.0)
    with pytest.raises(CompletionError, match=r"request chat-\d+/0 was lost"):
        asyncio.run(how(hanging_up, workload, lambda answer: None))  # type: ignore[operator]
