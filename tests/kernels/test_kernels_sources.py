"""The CUDA sources compile for every architecture, and take the arguments that they are given."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from kvgraph.kernels import compilers
from kvgraph.kernels.backends import native
from kvgraph.kernels.backends.native import CopyArgs, LayoutArgs, MoveArgs, PlaneArgs, RopeArgs
from kvgraph.kernels.compilers import ARCHITECTURES, SOURCES, compile_kernel
from kvgraph.kernels.errors import BuildError
from kvgraph.kernels.gpu.calls import (
    COMMON_DEFINES,
    ConfidenceArguments,
    CopyArguments,
    MassArguments,
    MoveArguments,
    attention_mass_call,
    confidence_call,
    move_call,
)
from kvgraph.kernels.layout import SlotMap, gpu_layout, new_memory
from kvgraph.kernels.rope import Pairing, Rope


def moved(source: Any, target: Any, rope: Rope) -> tuple[str, tuple[str, ...]]:
    """What a splice of Llama-8B's heads, or of MLA's latents, is compiled as."""
    dims, value = (576, 0) if rope.start else (128, 128)
    kv = [new_memory(gpu_layout("BLHNC", 1, 1, 1, 1, dims, value, of)) for of in (source, target)]
    none = torch.zeros(1, dtype=torch.int64)
    return "kv_move", move_call(*kv, SlotMap(none, none, none), rope).defines


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
    *(("kv_copy", (f"BYTES={width}", *COMMON_DEFINES)) for width in (4, 8, 16)),
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
    compile_kernel("kv_copy", ("BYTES=4", *COMMON_DEFINES), "sm_90")
    monkeypatch.setattr(compilers, "compiler_cuda", lambda: "12.9")
    compile_kernel("kv_copy", ("BYTES=4", *COMMON_DEFINES), "sm_90")
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
    [("kv_move", MoveArguments), ("kv_copy", CopyArguments),
     ("attention_mass", MassArguments), ("confidence", ConfidenceArguments)],
)  # fmt: skip
def test_arguments_have_the_names_and_the_order_of_the_source(kernel: str, arguments: Any) -> None:
    source = (SOURCES / f"{kernel}.cu").read_text()
    taken = re.search(rf"__global__[^{{]*\b{kernel}\(([^)]*)\)", source)
    assert taken is not None
    assert arguments._fields == tuple(re.findall(r"(\w+)(?:,|$)", taken[1]))


def test_the_sources_repeat_no_number_that_the_host_computes_with() -> None:
    for path in SOURCES.iterdir():
        code = re.sub(r"//.*", "", path.read_text())
        assert not re.search(r"__launch_bounds__\(\d|k(Warp|Lanes|Stages|Piece) = \d", code), path


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
