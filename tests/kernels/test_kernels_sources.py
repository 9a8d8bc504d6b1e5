"""The CUDA sources compile for every architecture, and take the arguments that they are given."""

from __future__ import annotations

import ctypes
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from kvgraph.kernels import compilers
from kvgraph.kernels.backends import native
from kvgraph.kernels.backends.native import CopyArgs, LayoutArgs, MoveArgs, PlaneArgs, RopeArgs
from kvgraph.kernels.compilers import ARCHITECTURES, SOURCES, compile_kernel
from kvgraph.kernels.errors import BuildError, TransferError
from kvgraph.kernels.gpu.calls import (
    COMMON_DEFINES,
    SHARED_LIMIT,
    ConfidenceArguments,
    CopyArguments,
    KernelCall,
    MassArguments,
    MoveArguments,
    attention_mass_call,
    confidence_call,
    move_call,
    runs_call,
)
from kvgraph.kernels.gpu.launch import loaded_kernel
from kvgraph.kernels.layout import Blocks, SlotMap, gpu_layout, new_memory
from kvgraph.kernels.rope import Pairing, Rope
from kvgraph.kernels.runs import block_runs
from kvgraph_bench.selftest import emulation
from kvgraph_bench.selftest.emulation import SHARED_OPT_IN, check_launch


def moved(source: Any, target: Any, rope: Rope) -> tuple[str, tuple[str, ...]]:
    """What a splice of Llama-8B's heads, or of MLA's latents, is compiled as."""
    dims, value = (576, 0) if rope.start else (128, 128)
    kv = [new_memory(gpu_layout("BLHNC", 1, 1, 1, 1, dims, value, of)) for of in (source, target)]
    none = torch.zeros(1, dtype=torch.int64)
    return "splice_tokens", move_call(*kv, SlotMap(none, none, none), rope).defines


def attended(dtype: Any, dims: int) -> tuple[str, tuple[str, ...]]:
    kv = new_memory(gpu_layout("BLHNC", 1, 1, 1, 16, dims, dims if dims == 128 else 0, dtype))
    table = torch.zeros(1, 1, dtype=torch.int64)
    call, _ = attention_mass_call(kv, 0, torch.zeros(1, 1, dims), table, table[0], 1.0)
    return "attention_mass", call.defines


def sure(dtype: Any, vocabulary: int) -> tuple[str, tuple[str, ...]]:
    return "confidence", confidence_call(torch.zeros(2, vocabulary, dtype=dtype))[0].defines


F32, F16, BF16, INT8 = torch.float32, torch.float16, torch.bfloat16, torch.int8
LLAMA = Rope(10_000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128))
LATENT = Rope(10_000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64), 512, Pairing.GPTJ)
ODD = Rope(LLAMA.inv_freq[:33], 3)  # neither begins nor ends where an access does
VARIANTS = [
    *(moved(source, target, LLAMA) for source in (F16, BF16, INT8) for target in (F16, BF16, INT8)),
    moved(BF16, BF16, LATENT), moved(F32, F32, LLAMA), moved(BF16, BF16, ODD),
    *(("copy_runs", (f"BYTES={width}", *COMMON_DEFINES)) for width in (4, 8, 16)),
    *(attended(dtype, 128) for dtype in (F16, BF16, INT8)), attended(BF16, 576),
    *(sure(dtype, 1024) for dtype in (F32, F16, BF16)), sure(BF16, 1023),
]  # fmt: skip


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_every_kernel_compiles_without_spilling_registers(
    architecture: str, record_property: Any, tmp_path: Any, monkeypatch: Any
) -> None:
    monkeypatch.setenv("AITHER_KVCACHE_KERNEL_CACHE", str(tmp_path))
    for kernel, defines in VARIANTS:
        made = compile_kernel(kernel, defines, architecture)
        record_property(f"{kernel} {' '.join(defines)} registers", made.registers)
        assert made.code[:4] == b"\x7fELF"
        assert made.spilled_bytes == made.stack_bytes == 0, "in registers, and nowhere else"
        assert 0 < made.registers <= 255
    again = compile_kernel(*VARIANTS[0], architecture)
    assert again.registers > 0
    assert len(list(tmp_path.glob("*.cubin"))) == len(VARIANTS)


def test_another_compiler_compiles_anew(tmp_path: Any, monkeypatch: Any) -> None:
    """A driver may refuse what the one before made: it must not be found again."""
    monkeypatch.setenv("AITHER_KVCACHE_KERNEL_CACHE", str(tmp_path))
    compile_kernel("copy_runs", ("BYTES=4", *COMMON_DEFINES), "sm_90")
    monkeypatch.setattr(compilers, "compiler_cuda", lambda: "12.9")
    compile_kernel("copy_runs", ("BYTES=4", *COMMON_DEFINES), "sm_90")
    assert len(list(tmp_path.glob("*.cubin"))) == 2


def test_a_source_that_does_not_compile_says_where(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("AITHER_KVCACHE_KERNEL_CACHE", str(tmp_path))
    with pytest.raises(BuildError, match=r"(?s)sm_90.*Bf17"):
        compile_kernel("confidence", ("SOURCE_T=Bf17", "BYTES=4", *COMMON_DEFINES), "sm_90")
    assert not list(tmp_path.glob("*.cubin"))


def test_missing_parts_are_named_with_their_remedy(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("AITHER_KVCACHE_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setitem(__import__("sys").modules, "cuda.core", None)
    with pytest.raises(BuildError, match=r"pip install 'kvgraph\[cuda\]'"):
        compile_kernel("confidence", ("SOURCE_T=float",), "sm_80")
    monkeypatch.undo()
    monkeypatch.setenv("AITHER_KVCACHE_KERNEL_CACHE", str(tmp_path))
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BuildError, match=r"install g\+\+"):
        native.load_library("x", [native.SOURCE], [])
    monkeypatch.setenv("AITHER_KVCACHE_KERNEL_CACHE", "/proc/nowhere")
    with pytest.raises(BuildError, match="AITHER_KVCACHE_KERNEL_CACHE"):
        compile_kernel("confidence", ("SOURCE_T=float",), "sm_80")


@pytest.mark.parametrize(
    ("kernel", "arguments"),
    [("splice_tokens", MoveArguments), ("copy_runs", CopyArguments),
     ("attention_mass", MassArguments), ("confidence", ConfidenceArguments)],
)  # fmt: skip
def test_arguments_have_the_names_and_the_order_of_the_source(kernel: str, arguments: Any) -> None:
    source = (SOURCES / f"{kernel}.cu").read_text()
    taken = re.search(rf"__global__[^{{]*\b{kernel}\(([^)]*)\)", source)
    assert arguments._fields == tuple(re.findall(r"(\w+)(?:,|$)", taken[1]))


def test_the_sources_have_nothing_that_the_compiler_of_cuda_12_refuses() -> None:
    """NVRTC 12.9 takes a lambda with ``auto`` parameters for a host function, and 13 does not."""
    for path in SOURCES.iterdir():
        assert not re.search(r"\[[&=]?\]\([^)]*\bauto\b", path.read_text()), path


@pytest.mark.parametrize("structure", [PlaneArgs, LayoutArgs, RopeArgs, MoveArgs, CopyArgs])
def test_structures_have_the_fields_and_the_order_of_the_cpu_source(structure: Any) -> None:
    source = re.sub(r"//.*", "", native.SOURCE.read_text())
    name = structure.__name__
    found = re.search(rf"struct (?:{name}|{name.removesuffix('Args')}) {{(.*?)\n}};", source, re.S)
    assert found is not None, name
    members = [line for line in found[1].split(";") if "(" not in line and "}" not in line]
    names = re.findall(r"(\w+)\s*(?:,|$)", ",".join(line.strip() for line in members))
    assert [field for field, _ in structure._fields_] == names


Seen = dict[str, Any]  # what was done with a driver
KIT = Path(__file__).parents[1] / "kit" / "driver"
COMPUTE, SIDE = 0x77, 0x99  # streams of cuda_launch.py
FORKS = "ignore:This process:DeprecationWarning"  # what Python 3.12 says of a fork beside threads


@pytest.fixture(scope="module")
def driven() -> dict[str, Seen]:
    """What was done with drivers: of each architecture, without batches of copies, too old."""
    drivers: dict[str, Seen] = {each: {"architecture": each} for each in ARCHITECTURES}
    drivers["no cuMemcpyBatchAsync"] = {"architecture": "sm_90", "batches": False}
    drivers["gave error 801"] = {"architecture": "sm_90", "refuses": 801}
    drivers["old"] = {"architecture": "sm_90", "cuda": 12080}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-W", FORKS,
         "-P", str(KIT / "cuda_launch.py"), *map(json.dumps, drivers.values())],
        env={**os.environ, "PYTHONPATH": str(KIT)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    results = re.findall(r"^RESULT (.*)$", done.stdout, re.MULTILINE)
    return dict(zip(drivers, map(json.loads, results), strict=True))


@pytest.fixture(params=ARCHITECTURES)
def seen(request: pytest.FixtureRequest, driven: dict[str, Seen]) -> Seen:
    return driven[request.param]


def test_every_operation_does_through_a_driver_what_the_reference_does(seen: Seen) -> None:
    assert seen["refused"] == []
    assert [name for name, right in seen["right"].items() if not right] == []


def test_arguments_are_as_many_and_as_large_as_the_compiled_kernel_says(seen: Seen) -> None:
    assert seen["mismatches"] == []
    kernels = {entry[1] for entry in seen["log"] if entry[0] == "launch"}
    assert kernels == {"copy_runs", "splice_tokens", "attention_mass", "confidence"}


def test_shared_memory_is_asked_for_once_and_before_the_launch_that_needs_it(seen: Seen) -> None:
    named = [entry[:2] for entry in seen["log"] if entry[1] == "copy_runs"]
    assert named[0] == ["allow", "copy_runs"]
    assert named[1:] == [["launch", "copy_runs"]] * (len(named) - 1)
    assert "65536 bytes of shared memory, 49152 were asked for" in seen["refusals"]["said"]
    assert seen["refusals"]["without the attribute"]


def test_what_a_device_cannot_give_is_an_error_in_words(seen: Seen) -> None:
    assert "copy_runs needs 262144 bytes of shared memory" in seen["refusals"]["too much"]


def test_all_runs_on_the_current_stream_and_copies_never_on_the_default_one(seen: Seen) -> None:
    assert seen["problem"] is None
    assert [entry[1] for entry in seen["log"] if entry[0] == "copy"] == [6, 6], "one batch each"
    assert {entry[2] for entry in seen["log"] if entry[0] in ("launch", "copy")} == {COMPUTE}
    before, copy, after, launch = seen["default stream"]
    assert (before, after) == (["wait", SIDE, 0], ["wait", 0, SIDE])
    assert copy[0] == "copy"
    assert copy[2] == SIDE
    assert launch[2] == 0


@pytest.mark.parametrize("problem", ["no cuMemcpyBatchAsync", "gave error 801"])
def test_without_batches_each_run_is_a_copy_of_its_own(
    driven: dict[str, Seen], problem: str
) -> None:
    seen = driven[problem]
    assert all(seen["right"].values())
    assert problem in seen["problem"]
    assert sum(entry[0] == "copy" for entry in seen["log"]) == 12


def test_a_driver_that_is_older_than_the_compiler_is_named_with_the_remedy(
    driven: dict[str, Seen],
) -> None:
    said = driven["old"]["refused to load"]
    assert "BuildError: the driver does not load copy_runs" in said
    assert "it has CUDA 12.8, the compiler is of CUDA 13." in said
    assert "pip install 'kvgraph[cuda12]'" in said


def test_a_gpu_that_is_too_old_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (7, 5))
    with pytest.raises(BuildError, match=r"GPU 1 has compute capability 7\.5; kernels need 8\.0"):
        loaded_kernel("copy_runs", (), 0, 1)


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
    return runs_call(blocks.kv, records.kv, block_runs(blocks, records), grid=1)


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
