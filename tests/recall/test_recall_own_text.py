"""What a session computed behind spliced text comes back to it elsewhere, and to nobody else."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
from kvgraph.hooks.recall.cover import SpliceLimits
from kvgraph_bench.paper.paper_engine import BLOCK_SIZE, Shape
from paper import words
from recall_usage import used

pytestmark = pytest.mark.usefixtures("vllm_loaded")
LIMITS = SpliceLimits(least_tokens=32, margin=4, most_generations=3)
HEAD, DOCUMENT, LATER = words(40, 1), words(100, 2), words(150, 3)


def session(name: str, **fields: Any) -> dict[str, Any]:
    tag = {"kvgraph": {"recall": True, "session": name}}
    return {"kv_transfer_params": tag, **fields}


@pytest.fixture
def make(recalls: Callable[..., Any]) -> Callable[[SpliceLimits], Any]:
    def engine(limits: SpliceLimits = LIMITS) -> Any:
        return recalls(Shape(blocks=97), limits)

    return engine


def behind_spliced(engine: Any, name: str = "mine", **fields: Any) -> dict[str, int]:
    """A turn in which ``LATER`` is said for the first time, behind a document that was spliced."""
    used(engine, [*HEAD, *DOCUMENT, *words(20, 5)], **session(name, **fields))
    told = used(engine, [*DOCUMENT, *LATER], 4, **session(name, **fields))
    assert told["spliced"] > 0
    return told


def moved(engine: Any, **fields: Any) -> int:
    """How many tokens are spliced where ``LATER`` stands at the beginning."""
    return used(engine, [*LATER, *words(9, 7)], **fields)["spliced"]


def test_it_comes_back_to_its_session(make: Callable[..., Any]) -> None:
    engine = make()
    behind_spliced(engine)
    whole = (len(DOCUMENT) + len(LATER)) // BLOCK_SIZE * BLOCK_SIZE - len(DOCUMENT)
    assert moved(engine, **session("mine")) == whole - LIMITS.margin


def test_it_does_not_where_that_was_not_calibrated(make: Callable[..., Any]) -> None:
    engine = make(replace(LIMITS, most_generations=1))
    behind_spliced(engine)
    assert moved(engine, **session("mine")) == 0


@pytest.mark.parametrize(
    "fields",
    [
        session("other"),
        {"kv_transfer_params": {"kvgraph": {"recall": True}}},
        session("mine", cache_salt="theirs"),
    ],
    ids=["another session", "no session", "another tenant"],
)
def test_nobody_else_finds_it(make: Callable[..., Any], fields: dict[str, Any]) -> None:
    engine = make()
    behind_spliced(engine)
    assert moved(engine, **fields) == 0


def test_what_was_spliced_is_taken_from_where_it_was_computed(make: Callable[..., Any]) -> None:
    """Keys are turned once: the copies that are read are those of the first request."""
    engine = make()
    first = engine.ask([*HEAD, *DOCUMENT, *words(20, 5)], 1, **session("mine"))
    engine.settle()
    used(engine, [*DOCUMENT, *LATER], 4, **session("mine"))
    read: list[bytes] = []
    begin = engine.side.bridge.loader.begin

    def watched(request_id: str, hashes: Any, blocks: Any, *splice: Any) -> None:
        read.extend(copy.block_hash for each in splice for copy in each.copies)
        begin(request_id, hashes, blocks, *splice)

    engine.side.bridge.loader.begin = watched
    assert used(engine, [*DOCUMENT[7:], *words(9, 8)], **session("mine"))["spliced"] > 0
    assert read
    assert set(read) <= set(first.block_hashes)


def test_generations_end_where_the_calibration_does(make: Callable[..., Any]) -> None:
    engine, told = make(), list[int]()
    behind_spliced(engine)
    for turn in range(4):
        later = words(100, 50 + turn)
        told.append(used(engine, [*LATER[turn + 1 :], *later], 4, **session("mine"))["spliced"])
        told.append(used(engine, [*later, *words(9, 70 + turn)], **session("mine"))["spliced"])
    # LATER is of the second generation, what is said behind it of the third, and so of the last.
    assert told[0] > 0
    assert told[1] > 0


def test_its_copies_never_reach_the_disk(make: Callable[..., Any]) -> None:
    engine = make()
    used(engine, [*HEAD, *DOCUMENT, *words(20, 5)], **session("mine"))
    request = engine.ask([*DOCUMENT, *LATER], 4, **session("mine"))
    engine.settle()
    directory = engine.side.bridge.ledger.directory
    copies = [directory.warm(each) for each in request.block_hashes]
    assert all(copy is not None for copy in copies)
    assert not any(copy.may_demote for copy in copies if copy is not None)


def test_a_reset_forgets_it(make: Callable[..., Any]) -> None:
    engine = make()
    behind_spliced(engine)
    assert engine.reset()
    assert moved(engine, **session("mine")) == 0


def test_a_named_tenants_text_is_its_own_whatever_the_salt(make: Callable[..., Any]) -> None:
    def asks(tenant: str | None, **fields: Any) -> dict[str, Any]:
        said = {"recall": True, **({"tenant": tenant} if tenant else {})}
        return {"kv_transfer_params": {"kvgraph": said}, **fields}

    engine = make()
    said = [*HEAD, *DOCUMENT, *words(20, 5)]
    used(engine, said, **asks("acme"))
    others = (asks("other"), asks(None), asks("acme", cache_salt="theirs"))
    for number, other in enumerate(others, 1):  # no prefix of them is cached
        assert used(engine, [*DOCUMENT[number:], *words(9, 7)], **other)["spliced"] == 0
    assert used(engine, [*DOCUMENT[5:], *words(9, 8)], **asks("acme"))["spliced"] > 0


def test_two_sessions_call_the_same_approximate_text_by_different_hashes(
    make: Callable[..., Any],
) -> None:
    def hashes(name: str) -> list[bytes]:
        request = engine.ask([*DOCUMENT, *LATER], 4, **session(name))
        engine.settle()
        return list(request.block_hashes)

    engine = make()
    used(engine, [*HEAD, *DOCUMENT, *words(20, 5)], **session("first"))
    one, other = hashes("one"), hashes("other")
    assert len(one) == len(other) > 5
    assert one != other
    assert one[-1] != other[-1]
