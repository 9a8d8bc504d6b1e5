"""Watch an engine through vLLM's own KV events: what its cache holds, and would best lose first.

python examples/watch_kv_events.py [ENDPOINT]    # of a running engine: tcp://127.0.0.1:5557

An engine publishes there if it was started with
--kv-events-config '{"enable_kv_cache_events": true, "publisher": "zmq"}'. Without ENDPOINT a
stand-in publishes in its place: no engine and no model, but four batches as vLLM would send them.
"""

from __future__ import annotations

import sys
import time
from typing import Any

import msgspec
import zmq
from kvgraph import KVCacheGraph, KvEventSource, ObserveConfig

SECONDS = 3.0  # it watches for so long


def stored(keys: list[int], parent: int | None) -> dict[str, Any]:
    chain = {"block_hashes": keys, "parent_block_hash": parent, "token_ids": [], "block_size": 16}
    return {"type": "BlockStored", **chain}


def stand_in(publisher: zmq.Socket[bytes]) -> None:
    """Play an engine that serves two prompts with the same beginning, and needs room."""
    publisher.recv()  # somebody subscribes
    gone = {"type": "BlockRemoved", "block_hashes": [13]}
    news = [stored([1, 2, 11, 12, 13], None), stored([21, 22], 2), gone, stored([23], 22)]
    for number, event in enumerate(news):
        batch = msgspec.msgpack.encode([time.time(), [event]])
        publisher.send_multipart([b"", number.to_bytes(8, "big"), batch])


context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
publisher = context.socket(zmq.XPUB)
own = f"tcp://127.0.0.1:{publisher.bind_to_random_port('tcp://127.0.0.1')}"
endpoint = sys.argv[1] if len(sys.argv) > 1 else own
source = KvEventSource(context, ObserveConfig(endpoint=endpoint), time.monotonic)
graph = KVCacheGraph()
if endpoint == own:
    stand_in(publisher)

end = time.monotonic() + SECONDS
while time.monotonic() < end:
    zmq.select(source.sockets, [], [], timeout=0.1)
    for events in source.receive(limit=100):
        if events is None:  # some were lost, or the engine is gone: nothing is known any more
            graph.forget_engine(source.engine)
        else:
            graph.apply(source.engine, events)
        kinds = ", ".join(type(event).__name__ for event in events or [])
        print(f"{kinds or 'lost'}: it holds {graph.resident_count(source.engine)} blocks")
print("first to go:", *graph.suggest_eviction(4, source.engine))
source.close()
context.destroy(linger=0)
