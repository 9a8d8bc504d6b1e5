"""How engines hash blocks is told by vLLM's own functions: alike where their hashes are alike."""

from __future__ import annotations

import random
import threading
import time
from collections.abc import Callable, Iterator
from itertools import combinations
from typing import Any, NamedTuple

import pytest
from kvgraph.graph.wire.events import BlockHashing, disagreements, hashing_of
from kvgraph.hooks.doctor import command
from kvgraph.hooks.vllm.groups import block_hashing
from kvgraph_bench.paper.paper_engine import BLOCK_SIZE, Shape
from vllm.utils.hashing import get_hash_fn_by_name, sha256
from vllm.v1.core import kv_cache_utils

pytestmark = pytest.mark.usefixtures("vllm_loaded")
ALGORITHMS = ("sha256", "sha256_cbor")
SEEDS = (None, "0", "1")


class Started(NamedTuple):
    """An engine's word, and what vLLM made of prompts there."""

    told: str
    hashes: list[bytes]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str | None], Started]:
    """Sets vLLM's hashing up as an engine core does, and hashes some prompts."""
    if hasattr(kv_cache_utils, "NONE_HASH"):
        monkeypatch.setattr(kv_cache_utils, "NONE_HASH", kv_cache_utils.NONE_HASH)

    def started(algorithm: str, seed: str | None) -> Started:
        if seed is None:
            monkeypatch.delenv("PYTHONHASHSEED", raising=False)
        else:
            monkeypatch.setenv("PYTHONHASHSEED", seed)
        hash_fn, rng = get_hash_fn_by_name(algorithm), random.Random(7)
        kv_cache_utils.init_none_hash(hash_fn)
        hashes: list[bytes] = []
        for _ in range(20):
            tokens = [rng.randrange(30_000) for _ in range(16)]
            parent = kv_cache_utils.hash_block_tokens(hash_fn, None, tokens)
            hashes += [parent, kv_cache_utils.hash_block_tokens(hash_fn, parent, tokens)]
        return Started(block_hashing(algorithm), hashes)

    return started


def test_engines_say_the_same_if_and_only_if_their_hashes_are_the_same(
    start: Callable[[str, str | None], Started],
) -> None:
    engines = [start(*kind) for kind in [(a, s) for a in ALGORITHMS for s in SEEDS] * 2]
    for one, other in combinations(engines, 2):
        alike = one.hashes == other.hashes
        assert alike or not set(one.hashes) & set(other.hashes)
        assert (one.told == other.told) is alike
    assert len({each.told for each in engines}) == len(ALGORITHMS) * len(SEEDS)


def test_what_is_told_is_short_and_no_hash(start: Callable[[str, str | None], Started]) -> None:
    told = start("sha256", "3").told
    algorithm, digest = told.split()
    assert algorithm == "sha256"
    assert len(digest) == 8
    assert digest not in kv_cache_utils.NONE_HASH.hex()


@pytest.fixture
def unset(start: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """vLLM's module as it is before an engine core is made."""
    monkeypatch.delattr(kv_cache_utils, "NONE_HASH", raising=False)
    return kv_cache_utils


def test_a_seed_that_comes_a_moment_later_is_waited_for(unset: Any) -> None:
    later = threading.Timer(0.05, unset.init_none_hash, [sha256])
    later.start()
    told = block_hashing("sha256", patience_s=10.0)
    later.join()
    assert told == block_hashing("sha256")
    assert told.startswith("sha256 ")


def test_without_a_seed_or_a_known_algorithm_nothing_is_told(unset: Any) -> None:
    began = time.monotonic()
    assert block_hashing("sha256", patience_s=0.05) == ""
    assert block_hashing("none of vLLM's") == ""
    assert time.monotonic() - began < 5


def test_an_engine_tells_it_in_its_hello(
    paper: Callable[..., Any], start: Callable[[str, str | None], Started]
) -> None:
    engine = paper(Shape())
    one, other = (start("sha256", seed).told for seed in ("1", "2"))
    assert engine.side.hello().hashing == other != one
    assert hashing_of(engine.side.hello()) == f"blocks of {BLOCK_SIZE} tokens, {other}"


def told(*kinds: str, model: str = "m") -> list[BlockHashing]:
    return [BlockHashing(f"gpu-{at}", model, kind) for at, kind in enumerate(kinds)]


def test_engines_of_one_model_that_disagree_are_named() -> None:
    assert disagreements(told("a", "a", "", "a")) == []
    assert disagreements(told("a") + told("b", model="other")) == []
    (said,) = disagreements(told("a", "b", "a", "", "a", "a") + told("c", model="other"))
    assert said.startswith(
        "Engines of 'm' hash blocks differently "
        "('gpu-0', 'gpu-2', 'gpu-4' and 1 more: a; 'gpu-1': b): they find nothing"
    )


def test_the_doctor_asks_what_runs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "running_sidecars", lambda: [0, 1])
    for kinds, ok, warns in ((["", ""], None, False), (["a", "a"], True, False),
                             (["a", "b"], True, True)):  # fmt: skip
        words = iter(told(*kinds))
        monkeypatch.setattr(command, "hashing_at", lambda sidecar, each=words: [next(each)])
        check = command.check_hashing()
        assert check.ok is ok
        assert ("PYTHONHASHSEED" in check.remedy) is warns
