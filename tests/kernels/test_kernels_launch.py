"""Launches as a driver sees them, and what it would refuse; on machines without a GPU too."""

from __future__ import annotations

import ctypes
import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kvgraph.kernels.compilers import ARCHITECTURES
from kvgraph.kernels.errors import BuildError, TransferError
from kvgraph.kernels.gpu.calls import SHARED_LIMIT, KernelCall, copy_call
from kvgraph.kernels.gpu.launch import loaded_kernel
from kvgraph.kernels.layout import Blocks, gpu_layout, new_memory
from kvgraph_bench.selftest import emulation
from kvgraph_bench.selftest.emulation import SHARED_OPT_IN, check_launch

KIT = Path(__file__).parents[1] / "kit" / "driver"
COMPUTE, SIDE = 0x77, 0x99  # streams of cuda_launch.py


def driven(architecture: str, **others: Any) -> dict[str, Any]:
    """What a process of its own did with a driver of an architecture."""
    options = json.dumps({"architecture": architecture, **others})
    done = subprocess.run(
        [sys.executable, "-W", "error", "-P", str(KIT / "cuda_launch.py"), options],
        env={**os.environ, "PYTHONPATH": str(KIT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    result: dict[str, Any] = json.loads(done.stdout.rpartition("RESULT ")[2])
    return result


@pytest.fixture(scope="module", params=ARCHITECTURES)
def seen(request: pytest.FixtureRequest) -> dict[str, Any]:
    return driven(request.param)


def test_every_operation_does_through_a_driver_what_the_reference_does(
    seen: dict[str, Any],
) -> None:
    assert seen["refused"] == []
    assert [name for name, right in seen["right"].items() if not right] == []


def test_arguments_are_as_many_and_as_large_as_the_compiled_kernel_says(
    seen: dict[str, Any],
) -> None:
    assert seen["mismatches"] == []
    kernels = {entry[1] for entry in seen["log"] if entry[0] == "launch"}
    assert kernels == {"kv_copy", "kv_move", "attention_mass", "confidence"}


def test_shared_memory_is_asked_for_once_and_before_the_launch_that_needs_it(
    seen: dict[str, Any],
) -> None:
    named = [entry[:2] for entry in seen["log"] if entry[1] == "kv_copy"]
    assert named[0] == ["allow", "kv_copy"]
    assert named[1:] == [["launch", "kv_copy"]] * (len(named) - 1)
    assert "65536 bytes of shared memory, 49152 were asked for" in seen["refusals"]["said"]
    assert seen["refusals"]["without the attribute"]


def test_what_a_device_cannot_give_is_an_error_in_words(seen: dict[str, Any]) -> None:
    assert "kv_copy needs 262144 bytes of shared memory" in seen["refusals"]["too much"]


def test_all_runs_on_the_current_stream_and_copies_never_on_the_default_one(
    seen: dict[str, Any],
) -> None:
    assert {entry[2] for entry in seen["log"] if entry[0] in ("launch", "copy")} == {COMPUTE}
    before, copy, after, launch = seen["default stream"]
    assert (before, after) == (["wait", SIDE, 0], ["wait", 0, SIDE])
    assert copy[0] == "copy"
    assert copy[2] == SIDE
    assert launch[2] == 0


def test_without_batches_each_run_is_a_copy_of_its_own() -> None:
    seen = driven("sm_90", batches=False)
    assert all(seen["right"].values())
    assert "no cuMemcpyBatchAsync" in seen["problem"]
    assert sum(entry[0] == "copy" for entry in seen["log"]) == 12


def test_a_driver_that_is_older_than_the_compiler_is_named_with_the_remedy() -> None:
    said = driven("sm_90", cuda=12080)["refused to load"]
    assert "BuildError: the driver does not load kv_copy" in said
    assert "it has CUDA 12.8, the compiler is of CUDA 13." in said
    assert "pip install 'kvgraph[cuda12]'" in said


def test_a_gpu_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    with pytest.raises(BuildError, match=r"GPU 1 has compute capability 7\.5; kernels need 8\.0"):
        loaded_kernel("kv_copy", (), 0, 1)


# What is refused --------------------------------------------------------------------------------


def call(**fields: Any) -> KernelCall:
    return replace(KernelCall("k", (), 1, 256, 0, (), ()), **fields)


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_a_launch_is_refused_for_what_a_driver_refuses_it_for(architecture: str) -> None:
    most = SHARED_OPT_IN[architecture]
    check_launch(call(shared=SHARED_LIMIT), architecture, SHARED_LIMIT)
    check_launch(call(shared=most), architecture, most)
    for wrong, allowed, registers, said in (
        (call(shared=SHARED_LIMIT + 1), SHARED_LIMIT, 0, "49153 bytes of shared memory"),
        (call(shared=64 << 10), 0, 0, "65536 bytes of shared memory, 49152 were asked for"),
        (call(shared=most + 1), most + 1, 0, f"allowed: {most}"),
        (call(grid=0), 0, 0, "0 thread blocks"),
        (call(grid=1 << 31), 0, 0, "2147483648 thread blocks"),
        (call(threads=512), 0, 0, "512 threads"),
        (call(threads=33), 0, 0, "33 threads"),
        (call(), 0, 257, "67584 registers"),
    ):
        with pytest.raises(TransferError, match=f"on {architecture}: .*{said}"):
            check_launch(wrong, architecture, allowed, registers)


def blocks_copied() -> KernelCall:
    cache = gpu_layout("LBNHC", 1, 4, 2, 16, 64)
    numbers = torch.arange(1)
    blocks, records = (Blocks(new_memory(each), numbers) for each in (cache, cache.record(2)))
    return copy_call(blocks, records, grid=1)


def test_emulation_refuses_a_launch_that_did_not_ask_for_its_shared_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    whole = blocks_copied()
    emulation.run(whole)
    monkeypatch.setattr(KernelCall, "shared_to_ask_for", 0)
    with pytest.raises(TransferError, match="65536 bytes of shared memory, 49152 were asked for"):
        emulation.run(whole)


def test_emulation_stops_at_a_misaligned_address_as_a_gpu_does() -> None:
    whole = blocks_copied()
    assert "BYTES=16" in whole.defines
    args: Any = whole.args
    for side in ("source", "target"):
        beside = ctypes.c_int64(getattr(args, side).value + 4)
        with pytest.raises(TransferError, match="misaligned"):
            emulation.run(replace(whole, args=args._replace(**{side: beside}))), side


def test_emulation_stops_beyond_shared_memory() -> None:
    whole = blocks_copied()
    with pytest.raises(TransferError, match="beyond shared memory"):
        emulation.run(replace(whole, shared=512))
