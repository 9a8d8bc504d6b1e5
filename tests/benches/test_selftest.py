"""``kvgraph selftest gpu`` and doctor's look at the GPU: on a GPU, in emulation, and without."""

from __future__ import annotations

import time
import types
from pathlib import Path
from typing import Any

import pytest
import torch
from kvgraph.hooks.doctor.gpu_check import check_gpu, check_kernel
from kvgraph.kernels.backends import attention
from kvgraph.kernels.errors import BuildError
from kvgraph_bench.selftest import emulation, selftest_cli
from kvgraph_bench.selftest.kernel_checks import Emulated, Report, checks, run_checks
from typer.testing import CliRunner

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
CHECKS = dict(checks(1))


def done(place: Any, chosen: dict[str, Any], ends: float | None = None) -> Report:
    report = Report(place.name)
    run_checks(report, place, chosen.items(), lambda text: None, ends or time.monotonic() + 600)
    return report


@pytest.mark.parametrize("name", CHECKS)
def test_the_kernels_pass_in_emulation(name: str) -> None:
    assert done(Emulated(), {name: CHECKS[name]}).checks == {name: "ok"}


class Forgetful(Emulated):
    """Its loads forget the last block, and its confidence is off."""

    name = "a broken GPU"

    def __init__(self) -> None:
        self.operations = types.ModuleType("broken")
        vars(self.operations).update(vars(emulation), load=self.load, confidence=self.confidence)

    def load(self, records: Any, blocks: Any) -> None:
        whole = (each._replace(numbers=each.numbers[:-1]) for each in (records, blocks))
        emulation.load(*whole)

    def confidence(self, logits: Any) -> Any:
        return attention.confidence(logits * 1.01)


def test_a_kernel_that_is_wrong_is_reported_by_name_and_bytes() -> None:
    report = done(
        Forgetful(), {each: CHECKS[each] for each in ("spill and load LBNHC", "confidence")}
    )
    assert report.failed == ["spill and load LBNHC", "confidence"]
    assert report.checks["spill and load LBNHC"].startswith("AssertionError: after load, ")
    assert "bytes of the cache are wrong" in report.checks["spill and load LBNHC"]
    assert not report.ok


def test_what_there_was_no_time_for_is_not_ok() -> None:
    report = done(Emulated(), {"confidence": CHECKS["confidence"]}, time.monotonic() - 1)
    assert report.failed == ["confidence"]


@no_gpu
@pytest.mark.parametrize(("cuda", "why"), [("13.0", "no driver"), (None, "not built for CUDA")])
def test_without_a_gpu_it_says_so_and_fails(
    cuda: str | None, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torch.version.cuda", cuda)
    result = CliRunner().invoke(selftest_cli.app, ["gpu"])
    assert result.exit_code == selftest_cli.NO_GPU
    assert "no GPU that torch can use (" in result.output
    assert why in result.output
    assert "kvgraph bench kernels" in result.output
    assert "{" not in result.output


# Doctor -----------------------------------------------------------------------------------------


@no_gpu
def test_doctor_says_that_there_is_no_gpu() -> None:
    check = check_gpu()
    assert check.ok is None
    assert "no kernel was tried" in check.detail


@no_gpu
@pytest.mark.parametrize(
    ("built_for", "visible", "ok", "words"),
    [
        (None, None, True, "built without CUDA"),
        ("13.0", None, False, "built for CUDA 13.0, can use no GPU"),
        ("13.0", "", None, "CUDA_VISIBLE_DEVICES hides all of them"),
    ],
)
def test_doctor_says_why_torch_sees_no_gpu_of_a_machine_that_has_one(
    built_for: str | None, visible: str | None, ok: bool | None, words: str,
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:  # fmt: skip
    (tmp_path / "proc/driver/nvidia").mkdir(parents=True)
    (tmp_path / "proc/driver/nvidia/version").write_text("NVRM version: 570.1")
    monkeypatch.setattr(torch.version, "cuda", built_for)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    check = check_gpu(tmp_path)
    assert check.ok is ok
    assert words in check.detail


@pytest.fixture
def two_gpus(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Two GPUs that are the emulation; which of them were tried."""
    from kvgraph.hooks.doctor import gpu_check

    tried: list[str] = []

    def kernel(observer: Any, where: str, name: str) -> Any:
        tried.append(where)
        return check_kernel(emulation, "cpu", name)

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda index: "NVIDIA H100")
    monkeypatch.setattr(gpu_check, "check_kernel", kernel)
    return tried


def test_doctor_tries_every_gpu_and_page_locks_memory(
    two_gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    cuda = types.SimpleNamespace(
        cudaHostRegister=lambda *_: 0, cudaHostUnregister=lambda address: 0
    )
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "check_error", lambda result: None)
    check = check_gpu()
    assert two_gpus == ["cuda:0", "cuda:1"]
    assert (check.ok, check.detail[:15]) == (True, "2 × NVIDIA H100")


def test_doctor_says_that_a_container_lets_no_memory_be_locked(
    two_gpus: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(result: int) -> None:
        raise RuntimeError("out of memory")

    cuda = types.SimpleNamespace(cudaHostRegister=lambda *_: 2, cudaHostUnregister=lambda _: 0)
    monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
    monkeypatch.setattr(torch.cuda, "check_error", refuse)
    check = check_gpu()
    assert check.ok is False
    assert "tiers need page-locked host memory" in check.detail
    assert "memlock" in check.remedy


def test_doctor_compiles_and_runs_a_kernel() -> None:
    check = check_kernel(emulation, "cpu", "emulation")
    assert check.ok
    assert check.detail == "emulation: a kernel was compiled and run"


def test_doctor_names_what_is_wrong_with_a_gpu() -> None:
    def missing(logits: Any) -> Any:
        raise BuildError("NVRTC is missing")

    def refused(logits: Any) -> Any:
        raise RuntimeError("no kernel image")

    def old(logits: Any) -> Any:
        raise BuildError("…; update the driver, or pip install 'kvgraph[cuda12]'") from RuntimeError

    def unknown(logits: Any) -> Any:
        raise BuildError("NVRTC for sm_130: invalid value") from RuntimeError("5")

    def full(logits: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory")

    def unkept(logits: Any) -> Any:
        raise BuildError("compiled kernels cannot be kept in /x") from OSError(13, "denied")

    for confidence, detail, remedy in (
        (missing, "no kernel can be compiled: NVRTC is missing", "pip install 'kvgraph[cuda]'"),
        (old, "pip install 'kvgraph[cuda12]'", ""),
        (unknown, "NVRTC for sm_130: invalid", "kvgraph selftest gpu"),
        (full, "its memory is full", "when no engine runs"),
        (unkept, "cannot be kept in /x", ""),
        (refused, "could not be run (RuntimeError: no kernel image)", "kvgraph selftest gpu"),
        (Forgetful().confidence, "a kernel is wrong by ", "kvgraph selftest gpu"),
    ):
        check = check_kernel(types.SimpleNamespace(confidence=confidence), "cpu", "H100")  # type: ignore[arg-type]
        assert check.ok is (None if confidence is full else False)
        assert detail in check.detail
        assert remedy in check.remedy if remedy else check.remedy == ""
