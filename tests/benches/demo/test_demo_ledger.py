"""The ledger knows which layer each stored block is of, and when its last copy has gone."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest
import zmq
from kvgraph.graph.types import SourceLayer
from kvgraph_bench.serving.cache_ledger import Books, Ledger, layers_of
from kvgraph_bench.serving.workload import BLOCK

RULES = tuple(range(100, 100 + BLOCK))
MIXED = tuple(range(200, 200 + BLOCK))
PROMPT = (*RULES, *MIXED, 7, 8, 9)
LAYERS = [
    *[SourceLayer.RULES] * BLOCK,
    *[SourceLayer.USER_TURN] * 20,
    *[SourceLayer.CONTEXT] * (BLOCK - 20 + 3),
]
KNOWN = dict(layers_of(PROMPT, LAYERS))


def payload(*events: dict[str, object]) -> bytes:
    return msgspec.msgpack.encode([12.5, list(events), 0])


def stored(
    hashes: list[int], tokens: Iterable[int], parent: int | None = None
) -> dict[str, object]:
    return {
        "type": "BlockStored",
        "block_hashes": hashes,
        "parent_block_hash": parent,
        "token_ids": list(tokens),
        "block_size": BLOCK,
        "lora_id": None,
        "medium": "CPU",
    }


def removed(*hashes: int) -> dict[str, object]:
    return {"type": "BlockRemoved", "block_hashes": list(hashes), "medium": "CPU"}


@pytest.fixture
def books() -> Books:
    return Books(KNOWN)


def test_blocks_are_booked_under_their_most_precious_layer(books: Books) -> None:
    books.apply(payload(stored([1, 2], RULES + MIXED)))
    assert books.tally.stored == {SourceLayer.RULES: 1, SourceLayer.CONTEXT: 1}


def test_the_ledger_reads_a_publisher_and_sees_holes(tmp_path: object) -> None:
    endpoint = f"ipc://{tmp_path}/events.sock"
    with zmq.Context() as context, context.socket(zmq.XPUB) as publisher:
        publisher.bind(endpoint)
        with Ledger(endpoint, KNOWN) as ledger:
            publisher.recv()  # it has subscribed
            for seq, batch in ((0, stored([1], RULES)), (3, removed(1))):
                publisher.send_multipart([b"", seq.to_bytes(8, "big"), payload(batch)])
            tally = ledger.take()
            assert (tally.protected_lost, tally.missed_batches) == (1, 2)
            assert ledger.take().protected_lost == 0
