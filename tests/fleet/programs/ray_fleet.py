"""Runs the documented ``fleet.py`` with loopback only; says which engine answered whom."""

from __future__ import annotations

import fcntl
import json
import socket
import struct
import sys
from collections import defaultdict

import httpx
import ray
from ray import serve

_SIOCSIFFLAGS, _IFF_UP = 0x8914, 0x1  # linux/sockios.h, linux/if.h


def loopback_up() -> None:
    """A new network's loopback is down."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, _SIOCSIFFLAGS, struct.pack("16sh22x", b"lo", _IFF_UP))


def main() -> None:
    loopback_up()
    ray.init(
        num_cpus=2, include_dashboard=False, object_store_memory=200 << 20,
        _node_ip_address="127.0.0.1", log_to_driver=True,
    )  # fmt: skip
    from fleet import fleet

    serve.run(fleet)
    homes: defaultdict[str, list[str]] = defaultdict(list)
    statuses = []
    with httpx.Client(base_url="http://127.0.0.1:8000", timeout=120, trust_env=False) as client:
        for turn in range(3):
            for session in ("a", "b", "c", "d", "e", "f"):
                body = {"model": "m", "prompt": f"{session} " * 400 * (turn + 1)}
                headers = {"X-Session-ID": session}
                answer = client.post("/v1/completions", json=body, headers=headers)
                statuses.append(answer.status_code)
                homes[session].append(answer.json()["id"])
    serve.shutdown()
    ray.shutdown()
    sys.stdout.write(json.dumps({"statuses": statuses, "homes": homes}) + "\n")


if __name__ == "__main__":
    main()
