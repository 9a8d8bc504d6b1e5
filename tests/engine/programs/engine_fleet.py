"""One real vLLM engine that plays recorded agents, as many of their requests as a file says."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

from kvgraph.advisor.replay.fleet_traffic import lay_over_users
from kvgraph.advisor.replay.recorded_sessions import read_sessions
from kvgraph_bench.recorded.agents_forcing import ANSWER, OPTIONS
from kvgraph_bench.recorded.agents_requests import AgentRequest, build_requests
from one_engine import generate, new_llm, run_program

SEED = 3
LONGEST = 2048  # tokens of a request; longer ones are left out


def main(options: dict[str, Any]) -> dict[str, Any]:
    """Play; ``allowed`` is a file that holds how many may have been served by now, or ``end``."""

    llm = new_llm(
        options["model"],
        max_model_len=LONGEST,
        blocks=options["blocks"],
        logits_processors=[OPTIONS[1]],
    )
    fleet = lay_over_users(read_sessions(Path(options["sessions"])), options["users"], 7200.0, SEED)
    served, cached = 0, 0
    for request in build_requests(fleet, options["vocabulary"], SEED):
        if len(request.prompt) + len(request.answer) > LONGEST:
            continue
        if not _may_serve(Path(options["allowed"]), served):
            break
        cached += _serve(llm, request)
        served += 1
    return {"served": served, "cached": cached}


def _may_serve(allowed: Path, served: int) -> bool:
    """Wait until one more request may be served; False at the end."""
    while (said := allowed.read_text().strip()) != "end":
        if said and int(said) > served:
            return True
        time.sleep(0.05)
    return False


def _serve(llm: Any, request: AgentRequest) -> int:
    said = request.body(1.0, hinted=True, layered=True)["kv_transfer_params"]
    answer = generate(
        llm, list(request.prompt), len(request.answer), stop_token_ids=[request.answer[-1]],
        extra_args={ANSWER: list(request.answer), "kv_transfer_params": said},
    )  # fmt: skip
    return answer.num_cached_tokens or 0


if __name__ == "__main__":
    run_program(main)
