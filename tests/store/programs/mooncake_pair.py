"""Two clients of one Mooncake master, in a network namespace; prints ``RESULT {json}``.

Called as ``unshare --net python -P mooncake_pair.py``; as ``… own`` it is the client that owns the
value and is killed.
"""

from __future__ import annotations

import json
import subprocess
import sys
import threading
import time
from typing import Any

from kvgraph.hooks.store.sealed import SealedRecords, store_key
from kvgraph_bench.fleet.apart import end
from kvgraph_bench.fleet.mooncake_processes import connected, start_master

SIZE = 1 << 20
KEY, NONE = bytes([1]) * 32, bytes([2]) * 32


def own() -> None:
    """Give the store a value, and hold it until killed."""
    records = SealedRecords(connected(256 << 20), "model")
    sys.stdout.write(f"{records.write(KEY, bytes(SIZE))}\n")
    sys.stdout.flush()
    threading.Event().wait()


def main() -> dict[str, Any]:
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    master = start_master()
    store = connected()
    command = [sys.executable, "-P", __file__, "own"]
    owner = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    assert owner.stdout.readline().strip() == "True"
    records, into = SealedRecords(store, "model"), bytearray(b"x" * SIZE)
    facts: dict[str, Any] = {
        "read": records.read(KEY, into) and into == bytes(SIZE),
        "missing": records.read(NONE, into),
        "holds": store.holds([store_key("model", each) for each in (KEY, NONE)]),
        "written": records.write(KEY, bytes(SIZE)),
        "spared": records.spared,
    }
    owner.kill()
    owner.wait()
    facts["owner_dead"] = records.read(KEY, into)
    master.kill()
    master.wait()
    return {**facts, **without_master(SealedRecords(store, "model"))}


def without_master(records: SealedRecords) -> dict[str, Any]:
    answers, into = list[bool](), bytearray(SIZE)
    seconds = list[float]()

    def ask() -> None:
        for _ in range(5):
            began = time.monotonic()
            answers.append(records.write(NONE, into))
            seconds.append(time.monotonic() - began)
            if len(answers) == 1 and not records.breaker.broken:
                answers.clear()  # the connection noticed nothing yet

    thread, gaps, last = threading.Thread(target=ask), [0.0], time.monotonic()
    thread.start()
    while thread.is_alive():
        time.sleep(0.005)
        gaps.append(time.monotonic() - last)
        last = time.monotonic()
    return {"master_dead": answers, "refused_s": max(seconds[1:]), "longest_gap_s": max(gaps)}


if __name__ == "__main__":
    if sys.argv[1:] == ["own"]:
        own()
    sys.stdout.write(f"\nRESULT {json.dumps(main())}\n")
    end()
