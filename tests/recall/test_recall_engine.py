"""Recall above vLLM's own scheduler: what comes back where, what a request says of it, and that
nobody else ever reads it.
"""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from kvgraph.advisor.page.misses import request_view
from kvgraph.graph.errors import ConfigError
from kvgraph.graph.kvcache_graph import KVCacheGraph
from kvgraph.graph.wire.advice import EvictionRanking
from kvgraph.hooks.recall.cover import SpliceLimits
from kvgraph.hooks.recall.gate import DIRECTORY_VARIABLE, calibration_file, load
from kvgraph.hooks.tiers.jobs import Load
from kvgraph_bench.paper.paper_engine import BLOCK_SIZE, Shape
from kvgraph_bench.recall.approximate import keep_calibration
from paper import words
from recall_usage import usages, used

pytestmark = pytest.mark.usefixtures("vllm_loaded")
LIMITS = SpliceLimits(least_tokens=32, margin=4)


def joined(*parts: Sequence[int]) -> list[int]:
    """Texts one after the other."""
    return [token for part in parts for token in part]


HEAD, DOCUMENT, ASK = words(40, 1), words(100, 2), words(20, 3)
LATER, OTHER_HEAD = words(150, 9), words(55, 4)
FIRST = joined(HEAD, DOCUMENT, ASK)
TURN = joined(DOCUMENT, ASK, words(100, 5))


def saying(recall: bool = True, salt: str | None = None, **names: str) -> dict[str, Any]:
    """What a request says of itself."""
    said = {"kv_transfer_params": {"kvgraph": {"recall": recall, **names}}}
    return said | ({"cache_salt": salt} if salt else {})


ASKS, MINE = saying(), saying(session="mine")


@pytest.fixture
def engine(recalls: Callable[..., Any]) -> Any:
    return recalls(Shape(blocks=97), LIMITS)


@pytest.fixture
def taught(engine: Any) -> Any:
    """An engine that has read the document behind a head."""
    used(engine, FIRST, **ASKS)
    return engine


@pytest.fixture
def branched(recalls: Callable[..., Any]) -> Any:
    """An engine of which ``mine`` heard LATER behind a document that was spliced."""
    engine = recalls(Shape(blocks=97), replace(LIMITS, most_generations=3))
    used(engine, FIRST, **MINE)
    assert used(engine, joined(DOCUMENT, LATER), 4, **MINE)["spliced"] > 0
    return engine


def test_text_comes_back_at_another_position(engine: Any) -> None:
    first = used(engine, FIRST, **ASKS)
    assert first == {"exact": 0, "own": 0, "spliced": 0, "computed": 160}
    # The document is behind 40 tokens of the prompt's own, which must be computed.
    assert used(engine, joined(OTHER_HEAD, DOCUMENT, ASK), **ASKS)["spliced"] == 0
    assert used(engine, joined(DOCUMENT, ASK), **ASKS)["spliced"] == 120 - 4 - 1
    engine.side.bridge.ledger.book.answer_all(())


def test_the_request_log_tells_what_was_spliced_apart(engine: Any) -> None:
    outbox, graph = engine.side.client.outbox, KVCacheGraph()
    outbox.open(1 << 16)
    used(engine, FIRST, **ASKS)
    spliced = used(engine, joined(DOCUMENT, ASK), **ASKS)["spliced"]
    graph.apply("e", [engine.side.hello(), *outbox.take_all()])
    history = graph.tables.history
    blocks = request_view(history, history.requests.next - 1, float).blocks
    assert blocks.spliced == spliced // BLOCK_SIZE > 0
    assert (blocks.pool, blocks.loaded, blocks.asked) == (0, 0, 120 // BLOCK_SIZE)
    assert (graph.counters["requests_spliced"], graph.counters["tokens_spliced"]) == (1, spliced)
    assert blocks.computed == blocks.asked - blocks.spliced


def test_survivors_of_a_cut_move_forward_behind_the_exact_head(engine: Any) -> None:
    """A dropped part in the middle: what stays is exact before it and spliced behind it."""
    dropped = words(64, 9)
    used(engine, joined(HEAD, words(8, 8), dropped, DOCUMENT), **ASKS)
    told = used(engine, joined(HEAD, words(8, 8), DOCUMENT, ASK), **ASKS)
    assert told["exact"] == 48
    copied = (48 + 64 + 100 - 1) // BLOCK_SIZE * BLOCK_SIZE - 48 - 64  # whole blocks, of the first
    assert told["spliced"] == copied - 4
    assert told["computed"] == 168 - 48 - copied + 4


def test_who_did_not_ask_gets_and_gives_nothing(taught: Any) -> None:
    assert used(taught, joined(DOCUMENT, ASK)) == {}
    used(taught, joined(words(100, 11), ASK))
    assert used(taught, joined(words(100, 11)[7:], ASK), **ASKS)["spliced"] == 0


def registered(engine: Any, request: Any) -> list[bytes]:
    """Which of its blocks anybody would find."""
    cached = engine.pool.cached_block_hash_to_block
    hashes: list[bytes] = request.block_hashes
    return [each for each in hashes if cached.get_one_block(each + bytes(4)) is not None]


def test_nothing_approximate_is_registered(taught: Any) -> None:
    """The model raises if anybody reads what was computed behind spliced tokens."""
    request = taught.ask(TURN, 70, **ASKS)
    taught.settle()
    assert taught.model.exact == {request.request_id: 0}
    assert registered(taught, request) == []
    taught.serve(TURN, 70)
    assert taught.model.spliced_read > 0


def test_it_stays_unregistered_when_the_rest_of_us_left(taught: Any) -> None:
    request = taught.ask(TURN, 70, **ASKS)
    taught.until(lambda: request.num_output_tokens > 3)
    taught.connector.disable("a test", RuntimeError())
    taught.settle()
    assert registered(taught, request) == []


def test_what_opted_in_is_copied_as_soon_as_its_turn_ends(engine: Any) -> None:
    request = engine.ask(FIRST, 1, **ASKS)
    engine.settle()
    assert all(each in engine.side.bridge.ledger.directory for each in request.block_hashes)


def test_a_failed_splice_is_computed(taught: Any) -> None:
    (worker,) = taught.workers
    worker.failing = lambda job: range(2) if getattr(job, "runs", ()) else ()
    taught.serve(joined(DOCUMENT, ASK), **ASKS)
    assert taught.side is not None
    taught.serve(joined(DOCUMENT, ASK))


def test_a_preempted_request_is_never_registered_beyond_what_is_exact(
    recalls: Callable[..., Any],
) -> None:
    engine = recalls(Shape(blocks=33), LIMITS)
    used(engine, FIRST, **ASKS)
    for seed in range(4):
        engine.ask(joined(DOCUMENT, ASK, words(30, 20 + seed)), 90, **ASKS)
        engine.ask(joined(words(60, 30 + seed)), 90)
    engine.settle()
    engine.serve(joined(DOCUMENT, ASK, words(30, 20)), 90)
    assert engine.side is not None


@pytest.mark.parametrize("passed", [None, False])
def test_without_a_calibration_that_passed_it_is_refused_in_words(
    passed: bool | None, paper: Callable[..., Any], paper_config: Any, tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture,
) -> None:  # fmt: skip
    monkeypatch.setenv(DIRECTORY_VARIABLE, str(tmp_path))
    if passed is not None:
        keep_calibration(paper_config.model_config, tmp_path, LIMITS, passed)
    caplog.set_level(logging.WARNING)
    engine = paper(Shape(blocks=97))
    used(engine, FIRST)
    assert "no recall" not in caplog.text
    told = used(engine, joined(DOCUMENT, ASK), **ASKS)
    reason = "not calibrated" if passed is None else "did not pass its calibration"
    assert reason in told["refused"]
    assert caplog.text.count("kvgraph: no recall in this engine") == 1


def test_an_engine_without_tiers_says_so_if_it_is_told_to_recall(
    paper: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("AITHER_KVCACHE_RECALL", "1")
    caplog.set_level(logging.WARNING)
    paper(Shape(warm=None))
    assert "no recall in this engine: it has no tiers" in caplog.text


def test_the_endpoint_can_ask_for_all_and_switch_off_for_all(
    recalls: Callable[..., Any], paper: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AITHER_KVCACHE_RECALL", "1")
    engine = recalls(Shape(blocks=97), LIMITS)
    used(engine, FIRST)
    assert used(engine, joined(DOCUMENT, ASK))["spliced"] > 0
    assert used(engine, joined(DOCUMENT, ASK, [7]), **saying(recall=False)) == {}
    monkeypatch.setenv("AITHER_KVCACHE_RECALL", "0")
    assert used(paper(Shape(blocks=97)), joined(DOCUMENT, ASK), **ASKS) == {}


@pytest.mark.usefixtures("engine")
def test_a_calibration_of_another_model_is_refused(paper_config: Any) -> None:
    from kvgraph.hooks.vllm.recall.support import model_identity

    model = paper_config.model_config
    path = calibration_file(model_identity(model, model.max_model_len))
    assert load(model_identity(model, model.max_model_len), path).passed
    with pytest.raises(ConfigError, match="not of this model"):
        load("another", path)


@pytest.mark.usefixtures("engine")
@pytest.mark.parametrize("text", ["{}", "[" * 100_000], ids=["empty", "nested deep"])
def test_a_file_that_is_no_calibration_is_refused(text: str, tmp_path: Path) -> None:
    (path,) = tmp_path.glob("*.json")
    identity = json.loads(path.read_text())["identity"]
    path.write_text(text)
    with pytest.raises(ConfigError, match=r"cannot be read .*calibrate again"):
        load(identity, path)


def test_a_sessions_next_turn_finds_what_it_computed_behind_spliced_text(taught: Any) -> None:
    assert used(taught, TURN, output=30, **MINE)["spliced"] > 0
    said = taught.outputs[max(taught.outputs, key=lambda name: int(name[1:]))]
    again = joined(TURN, said, words(40, 6))
    told = used(taught, again, output=5, **MINE)
    whole = (len(TURN) + 30 - 1) // BLOCK_SIZE * BLOCK_SIZE
    assert (told["exact"], told["own"], told["spliced"]) == (0, whole, 0)
    assert used(taught, joined(again, words(20, 7)), **MINE)["own"] > whole


def test_it_finds_it_elsewhere_too(branched: Any) -> None:
    whole = (len(DOCUMENT) + len(LATER)) // BLOCK_SIZE * BLOCK_SIZE - len(DOCUMENT)
    assert used(branched, joined(LATER, ASK), **MINE)["spliced"] == whole - LIMITS.margin


def test_it_does_not_where_that_was_not_calibrated(taught: Any) -> None:
    assert used(taught, joined(DOCUMENT, LATER), 4, **MINE)["spliced"] > 0
    assert used(taught, joined(LATER, ASK), **MINE)["spliced"] == 0


def test_what_is_said_behind_it_is_of_the_last_generation_and_found_too(branched: Any) -> None:
    last = words(100, 50)
    assert used(branched, joined(LATER[1:], last), 4, **MINE)["spliced"] > 0
    assert used(branched, joined(last, ASK), **MINE)["spliced"] > 0


@pytest.mark.parametrize(
    "fields",
    [saying(session="other"), ASKS, {}, saying(session="mine", salt="theirs")],
    ids=["another session", "no session", "plain", "another tenant"],
)
def test_nobody_else_finds_it(branched: Any, fields: dict[str, Any]) -> None:
    assert used(branched, joined(LATER, ASK), **fields).get("spliced", 0) == 0
    assert used(branched, joined(DOCUMENT, LATER, ASK), 5, **fields).get("own", 0) == 0


def test_what_a_session_left_is_given_up_with_a_reset(branched: Any) -> None:
    assert branched.reset()
    assert used(branched, joined(LATER, ASK), **MINE)["spliced"] == 0
    told = used(branched, joined(DOCUMENT, LATER, ASK), **MINE)
    assert (told["own"], told["spliced"]) == (0, 0)
    # So it is exact again, and found by all.
    assert used(branched, joined(DOCUMENT, LATER, ASK, [7]), **ASKS)["exact"] > len(DOCUMENT)


def test_a_text_belongs_to_whoever_is_first_to_compute_it_after_a_reset(
    recalls: Callable[..., Any],
) -> None:
    engine = recalls(Shape(blocks=97), LIMITS, "")
    used(engine, FIRST, **MINE)
    assert engine.reset()
    used(engine, FIRST, **saying(session="other"))
    assert used(engine, joined(DOCUMENT, ASK), **saying(session="other"))["spliced"] > 0


def test_what_was_worth_a_copy_before_a_reset_is_not_after_it(taught: Any) -> None:
    marks = taught.side.bridge.spiller.marks
    marks.follow(EvictionRanking.empty(0.0))
    marks.follow = lambda ranking: False
    assert taught.reset()
    plain = taught.ask(FIRST)
    taught.settle()
    for seed in range(8):  # the pool loses it
        taught.serve(words(400, 1000 + seed))
    assert taught.pool.get_cached_block(plain.block_hashes[0], [0]) is None
    assert not any(map(taught.side.bridge.ledger.directory.warm, plain.block_hashes))


def test_what_was_spliced_is_taken_from_where_it_was_computed(engine: Any) -> None:
    """Keys are turned once: the copies that are read are those of the first request."""
    first = engine.ask(FIRST, 1, **MINE)
    engine.settle()
    used(engine, joined(DOCUMENT, LATER), 4, **MINE)
    read: list[bytes] = []
    begin = engine.side.bridge.loader.begin

    def watched(request_id: str, hashes: Any, blocks: Any, *splice: Any) -> None:
        read.extend(copy.block_hash for each in splice for copy in each.copies)
        begin(request_id, hashes, blocks, *splice)

    engine.side.bridge.loader.begin = watched
    assert used(engine, joined(DOCUMENT[7:], ASK), **MINE)["spliced"] > 0
    assert read
    assert set(read) <= set(first.block_hashes)


def test_a_sessions_approximate_blocks_never_reach_the_disk(taught: Any) -> None:
    request = taught.ask(TURN, 30, **MINE)
    taught.settle()
    directory, copies = taught.side.bridge.ledger.directory, list[Any]()
    for seed in range(40):
        taught.serve(words(100, 100 + seed))
        copies += [copy for copy in map(directory.warm, request.block_hashes) if copy is not None]
    assert copies
    assert not any(copy.may_demote for copy in copies)


@pytest.mark.parametrize("generations", [1, 4])
def test_nor_do_they_when_their_request_is_preempted(
    generations: int, recalls: Callable[..., Any]
) -> None:
    engine = recalls(Shape(blocks=33), replace(LIMITS, most_generations=generations))
    used(engine, FIRST, **ASKS)
    for seed in range(2):
        engine.ask(words(60, 30 + seed), 150)
    engine.step()
    mine = engine.ask(joined(DOCUMENT, ASK, words(30, 20)), 90, **MINE)  # the last goes
    engine.until(lambda: mine.num_preemptions > 0)
    directory, copies = engine.side.bridge.ledger.directory, list[Any]()

    def looked() -> bool:
        copies.extend(filter(None, map(directory.warm, mine.block_hashes)))
        return mine.is_finished()

    engine.until(looked)
    assert copies
    assert not any(copy.may_demote for copy in copies)


@pytest.mark.parametrize("asynchronous", [False, True])
def test_nor_does_the_block_that_the_last_step_fills(
    asynchronous: bool, recalls: Callable[..., Any]
) -> None:
    shape = Shape(blocks=33, warm=40, cold=1024, asynchronous=asynchronous)
    for output in range(1, 33, 3):
        engine = recalls(shape, LIMITS)
        used(engine, FIRST, **ASKS)
        mine = engine.ask(joined(DOCUMENT, words(90, 4)), output, **MINE)
        engine.settle()
        for seed in range(4):
            engine.serve(words(20 * BLOCK_SIZE, 100 + seed), 2)
        assert engine.workers[0].disk
        assert not set(mine.block_hashes) & set(engine.workers[0].disk)


def test_what_is_spliced_has_other_names_than_what_was_computed(
    recalls: Callable[..., Any],
) -> None:
    """The same text again, whose computed blocks are gone from pool and memory meanwhile."""
    engine = recalls(Shape(blocks=65, warm=400), SpliceLimits(margin=0))
    document, later = words(96, 1), words(96, 2)
    used(engine, joined(words(24, 3), document, words(24, 4)), **ASKS)
    first = engine.ask(joined(document, later, words(20, 5)), 2, **MINE)
    engine.settle()
    used(engine, joined(words(40, 6), later, words(20, 7)), **ASKS)  # exact, elsewhere
    computed = first.block_hashes[len(document) // BLOCK_SIZE :]
    directory = engine.side.bridge.ledger.directory
    for seed in range(6):
        engine.serve(words(30 * BLOCK_SIZE, 500 + seed), 1)
    directory.drop_all(list(filter(None, map(directory.warm, computed))))
    again = engine.ask(joined(document, later, words(40, 8)), 2, **MINE)
    engine.until(lambda: again.num_output_tokens)
    assert engine.side.recall.exact[again.request_id] == 0
    assert not set(again.block_hashes) & set(computed)


@pytest.mark.parametrize(
    ("field", "value"),
    [("passed", "no"), ("least_tokens", "32"), ("margin", None), ("most_joints", 0),
     ("most_generations", 1.5), ("most_later", -1), ("openings", ...)],
)  # fmt: skip
@pytest.mark.usefixtures("engine")
def test_a_calibration_that_was_edited_is_refused(
    field: str, value: object, tmp_path: Path
) -> None:
    (path,) = tmp_path.glob("*.json")
    read = json.loads(path.read_text())
    inner = read if field == "passed" else read["limits"]
    if value is ...:
        del inner[field]
    else:
        inner[field] = value
    path.write_text(json.dumps(read))
    with pytest.raises(ConfigError, match=r"cannot be read .*calibrate again"):
        load(read["identity"], path)


@pytest.fixture
def is_found(recalls: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> Callable[..., bool]:
    def found(hints: str, shared: str, one: dict[str, Any], other: dict[str, Any]) -> bool:
        monkeypatch.setenv("AITHER_KVCACHE_HINTS", hints)
        engine = recalls(Shape(blocks=97), LIMITS, shared)
        used(engine, FIRST, **one)
        return bool(used(engine, joined(DOCUMENT, ASK), **other).get("spliced"))

    return found


@pytest.mark.parametrize("hints", ["session", "all"])
@pytest.mark.parametrize("shared", ["", "1"])
@pytest.mark.parametrize(
    ("one", "other", "finds"),
    [
        (saying(session="s"), saying(session="s"), {"", "1"}),
        (saying(session="s"), saying(session="t"), {"1"}),
        (saying(session="s"), saying(), {"1"}),
        (saying(), saying(), {"1"}),
        (saying(salt="x"), saying(salt="x"), {"", "1"}),
        (saying(salt="x", session="s"), saying(salt="x", session="t"), {"", "1"}),
        (saying(salt="x"), saying(salt="y"), set()),
        (saying(), saying(salt="x"), set()),
        (saying(salt="x", session="s"), saying(session="s"), set()),
        (saying(salt="x", session="s"), saying(salt="y", session="s"), set()),
    ],
)
def test_whose_text_is_found(
    is_found: Callable[..., bool],
    hints: str, shared: str, one: dict[str, Any], other: dict[str, Any], finds: set[str],
) -> None:  # fmt: skip
    assert is_found(hints, shared, one, other) is (shared in finds)


@pytest.mark.parametrize("shared", ["", "1"])
@pytest.mark.parametrize(
    ("hints", "one", "other", "finds"),
    [
        ("all", saying(tenant="a"), saying(tenant="a"), True),
        ("all", saying(tenant="a"), saying(tenant="a", salt="x"), False),
        ("all", saying(tenant="a"), saying(tenant="b"), False),
        ("all", saying(tenant="a"), saying(), False),
        ("all", saying(tenant="a", session="s"), saying(tenant="a", session="t"), True),
        ("all", saying(tenant="a", session="s"), saying(tenant="b", session="s"), False),
        ("all", saying(tenant="a", session="s"), saying(session="s"), False),
        ("all", saying(tenant="a", salt="x"), saying(tenant="b", salt="x"), False),
        (
            "all",
            saying(salt="x", tenant="", session="s"),
            saying(salt="y", tenant="", session="s"),
            False,
        ),
        ("session", saying(tenant="a", session="s"), saying(tenant="b", session="s"), True),
    ],
)
def test_named_tenants_are_apart_where_their_names_count(
    is_found: Callable[..., bool],
    shared: str, hints: str, one: dict[str, Any], other: dict[str, Any], finds: bool,
) -> None:  # fmt: skip
    assert is_found(hints, shared, one, other) is finds


def test_who_says_not_whose_text_it_is_is_told_why_nothing_comes_back(
    recalls: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("AITHER_KVCACHE_RECALL", "1")
    engine = recalls(Shape(blocks=97), LIMITS, "")
    for _ in range(2):
        assert "name its session" in used(engine, FIRST, **ASKS)["refused"]
        assert used(engine, joined(DOCUMENT, ASK)) == {}, "who did not ask is not bothered"
    assert not engine.side.recall._opt_in._ownerless


def test_two_sessions_with_one_text_have_private_names_of_their_own(taught: Any) -> None:
    text, hashes = joined(DOCUMENT, ASK, words(60, 8)), []
    for name in ("one", "two"):
        request = taught.ask(text, 40, **saying(session=name))
        taught.settle()
        hashes.append(list(request.block_hashes))
    one, two = hashes
    assert len(one) == len(two) > 8
    private = set(one) - set(taught.make("probe", text, 1).block_hashes)
    assert len(private) > 4
    assert not private & set(two)


@pytest.fixture
def roomy(recalls: Callable[..., Any]) -> Any:
    return recalls(Shape(blocks=97, warm=400), replace(LIMITS, most_generations=3))


def usage_of(engine: Any, request: Any) -> dict[str, int]:
    """What a request that is under way says at its end."""
    with usages(engine) as told:
        engine.until(request.is_finished)
    return told[-1]


def lose(engine: Any, request: Any) -> None:
    """Preempt a request, and lose its blocks and their copies."""
    ledger = engine.side.bridge.ledger
    engine.scheduler.running.remove(request)
    engine.scheduler._preempt_request(request, time.time())
    ledger.give_up([copy for copy in map(ledger.directory.warm, request.block_hashes) if copy])
    held = [engine.pool.get_cached_block(each, [0]) for each in request.block_hashes]
    engine.pool.evict_blocks({block.block_id for blocks in held for block in blocks or ()})


def test_who_is_spliced_after_a_preemption_says_so(roomy: Any) -> None:
    def steps(number: int) -> None:
        for _ in range(number):
            roomy.step()
            roomy.finish_copies()

    mine = roomy.ask(joined(DOCUMENT, words(30, 20)), 40, **MINE)
    steps(5)
    roomy.until(roomy.ask(FIRST, 2, **ASKS).is_finished)
    steps(3)
    lose(roomy, mine)
    told = usage_of(roomy, mine)
    assert (told["exact"], told["spliced"]) == (0, len(DOCUMENT) - LIMITS.margin)
    assert sum(told.values()) == mine.num_prompt_tokens


def test_after_a_load_that_failed_all_was_computed(roomy: Any) -> None:
    used(roomy, FIRST, **MINE)
    (worker,) = roomy.workers
    worker.failing = lambda job: range(len(job.targets)) if isinstance(job, Load) else ()
    mine = roomy.ask(joined(DOCUMENT, LATER), 4, **MINE)
    told = usage_of(roomy, mine)
    assert told == {"exact": 0, "own": 0, "spliced": 0, "computed": mine.num_prompt_tokens}


def test_a_session_that_goes_on_finds_its_branch_though_nobody_advises_copies(roomy: Any) -> None:
    marks = roomy.side.bridge.spiller.marks
    marks.follow(EvictionRanking.empty(0.0))
    marks.follow = lambda ranking: False
    used(roomy, FIRST, **MINE)
    text, found = joined(DOCUMENT, words(90, 3)), list[int]()
    for turn in range(4):
        found.append(used(roomy, text, 4, **MINE)["own"])
        text = joined(text, words(50, 60 + turn))
        for seed in range(8):  # the pool loses it
            roomy.serve(words(400, 1000 + turn * 10 + seed))
    assert found[0] == 0
    assert all(later >= 150 for later in found[1:])
