"""A real engine, of several processes, tells why answers ended, and its prompts' layers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from kvgraph.graph.types import Authority, SourceLayer
from kvgraph.graph.wire.events import RequestFinished, RequestStarted, Segment
from kvgraph_bench.meaning.families import FAMILIES, Call, FamilyWriter, write_family

pytestmark = pytest.mark.engine
HERMES = FAMILIES[0]
MOST = 80
HINTED = 5  # chats without hints, with some, absurd and forged ones, and the last one's tokens


@pytest.mark.parametrize("user_connector", [False, True], ids=["alone", "beside"])
def test_an_engine_tells_why_its_answers_ended_and_which_layers_its_prompts_have(
    tmp_path: Path, new_engine: Any, router: Any, user_connector: bool
) -> None:
    model = write_family(HERMES, tmp_path / "model")
    write = _writer(model)
    call = HERMES.write([Call("web-search", {"query": "x"})], False)
    answers = [
        write.tokens(call + HERMES.turn_end),
        write.tokens("Here you are." + HERMES.turn_end),
        write.tokens(f"A call is {call}, as you see." + HERMES.turn_end),
        write.tokens(call + " and so on " * 40)[:MOST],
    ]
    heard = tmp_path / "heard"
    engine = new_engine(
        "engine_ends.py",
        {"model": str(model), "answers": answers, "max_tokens": MOST,
         "user_connector": user_connector, "heard": str(heard)},
        AITHER_KVCACHE_GRAPH="1", AITHER_KVCACHE_SIDECAR=router.endpoint,
        VLLM_ENABLE_V1_MULTIPROCESSING="1", AITHER_KVCACHE_LAYERS="1",
    )  # fmt: skip
    router.read_until(
        lambda: len(_ends(router)) == len(answers) + HINTED or not engine.running, 240
    )
    heard.touch()
    run = engine.run()
    assert run.result["finish"] == ["stop", "stop", "stop", "length"]
    told = [(end.waiting_for_tool, end.tool) for end in _ends(router)]
    expected = [(True, "web-search"), (False, None), (False, None), (None, None)]
    assert told[: len(answers)] == expected
    starts = [event for event in router.events if isinstance(event, RequestStarted)]
    plain, hinted, absurd, forged, stream = (start.segments for start in starts[len(answers) :])
    system = plain[0]
    assert (system.layer, system.start, system.authority) == (SourceLayer.RULES, 0, 0)
    assert _layers(plain[1:])[0] == SourceLayer.USER_TURN
    assert SourceLayer.AXIOMS not in _layers(plain), "it was typed"
    stated = [segment for segment in hinted if segment.authority == Authority.CALLER]
    assert [(s.layer, s.name) for s in stated] == [(SourceLayer.IDENTITY, "file:policy.md#0")]
    assert 0 < stated[0].start < stated[0].end <= system.end
    for others in (absurd, forged, stream):
        assert _layers(others)[0] == SourceLayer.RULES
        assert SourceLayer.AXIOMS not in _layers(others)
        assert others[0].end == system.end


def _layers(segments: tuple[Segment, ...]) -> list[SourceLayer]:
    return [SourceLayer(segment.layer) for segment in segments]


def _ends(router: Any) -> list[RequestFinished]:
    return [event for event in router.events if isinstance(event, RequestFinished)]


def _writer(model: Path) -> FamilyWriter:
    from transformers import AutoTokenizer

    return FamilyWriter(HERMES, AutoTokenizer.from_pretrained(model))
