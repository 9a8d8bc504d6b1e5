"""The CUDA sources compile for every architecture, and take the arguments that they are given."""

from __future__ import annotations

import re
from typing import Any

import pytest
from kvgraph.kernels.backends import native
from kvgraph.kernels.backends.native import CopyArgs, LayoutArgs, MoveArgs, PlaneArgs, RopeArgs
from kvgraph.kernels.compilers.nvrtc import ARCHITECTURES, SOURCES, compile_kernel
from kvgraph.kernels.errors import BuildError
from kvgraph.kernels.gpu.arguments import (
    ConfidenceArguments,
    CopyArguments,
    MassArguments,
    MoveArguments,
)
from kvgraph.kernels.gpu.calls import COMMON_DEFINES

VARIANTS = [
    *(("kv_move", (f"SOURCE_T={s}", f"TARGET_T={t}", f"SOURCE_BYTES={8 if s == 'Int8' else 16}",
                   f"TARGET_BYTES={4 if t == 'Int8' else 16}", *COMMON_DEFINES))
      for s in ("Half", "Bf16", "Int8") for t in ("Half", "Bf16", "Int8")),
    *(("kv_copy", (f"BYTES={width}", *COMMON_DEFINES)) for width in (4, 8, 16)),
    *(("attention_mass", (f"SOURCE_T={s}", *COMMON_DEFINES)) for s in ("Half", "Bf16", "Int8")),
    *(("confidence", (f"SOURCE_T={s}", *COMMON_DEFINES)) for s in ("float", "Half", "Bf16")),
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
        assert made.spilled_bytes == 0
        assert 0 < made.registers <= 255
    again = compile_kernel(*VARIANTS[0], architecture)
    assert again.registers > 0
    assert len(list(tmp_path.glob("*.cubin"))) == len(VARIANTS)


def test_a_source_that_does_not_compile_says_where(tmp_path: Any, monkeypatch: Any) -> None:
    monkeypatch.setenv("AITHER_KVCACHE_KERNEL_CACHE", str(tmp_path))
    with pytest.raises(BuildError, match=r"(?s)sm_90.*Bf17"):
        compile_kernel("confidence", ("SOURCE_T=Bf17", *COMMON_DEFINES), "sm_90")
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


@pytest.mark.parametrize("structure", [PlaneArgs, LayoutArgs, RopeArgs, MoveArgs, CopyArgs])
def test_structures_have_the_fields_and_the_order_of_the_cpu_source(structure: Any) -> None:
    source = re.sub(r"//.*", "", native.SOURCE.read_text())
    name = structure.__name__
    found = re.search(rf"struct (?:{name}|{name.removesuffix('Args')}) {{(.*?)\n}};", source, re.S)
    assert found is not None, name
    members = [line for line in found[1].split(";") if "(" not in line and "}" not in line]
    names = re.findall(r"(\w+)\s*(?:,|$)", ",".join(line.strip() for line in members))
    assert [field for field, _ in structure._fields_] == names
