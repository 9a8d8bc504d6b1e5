"""The GPU path over a driver that checks: cuda.core, cuda.bindings and all of ours are real.

Called as ``python -P cuda_launch.py OPTIONS_JSON...``; prints a line ``RESULT {json}`` for each, of
a process of its own that is forked when all is imported. Of torch, whose builds for the CPU have no
streams, the few calls that we make are given their meaning here.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import sys
import traceback
from collections.abc import Callable
from dataclasses import replace
from types import ModuleType
from typing import Any

import torch
from cuda_driver import Driver
from kvgraph.kernels import ops
from kvgraph.kernels.backends import attention, device, reference
from kvgraph.kernels.gpu import calls, copy_engine, launch, moves
from kvgraph.kernels.gpu.calls import COMMON_DEFINES
from kvgraph.kernels.gpu.moves import COPY_ENGINE
from kvgraph.kernels.layout import Blocks, KvLayout, PagedKv, SlotMap, gpu_layout, new_memory
from kvgraph.kernels.rope import Rope


def without_vllm() -> ModuleType:
    """What measures a step. It takes two classes of vLLM's, for what is told to the scheduler and
    so not here; to import vLLM for them takes longer than all the rest.
    """
    taken = {
        "vllm.distributed.kv_transfer.kv_connector.v1.base": "KVConnectorWorkerMetadata",
        "vllm.v1.outputs": "KVConnectorOutput",
    }
    for name, wanted in taken.items():
        parts = name.split(".")
        for count in range(1, len(parts) + 1):
            folder = ".".join(parts[:count])
            sys.modules.setdefault(folder, ModuleType(folder))
        setattr(sys.modules[name], wanted, type(wanted, (), {}))
    from kvgraph.hooks.vllm.sampled import measuring

    return measuring


measuring = without_vllm()
CACHE = gpu_layout("LBNHC", 2, 12, 2, 16, 64)
ROPE = Rope(10_000.0 ** (-torch.arange(0, 64, 2, dtype=torch.float64) / 64))
BLOCKS, RECORDS = torch.tensor([3, 7, 5]), torch.tensor([0, 2, 1])
COMPUTE, SIDE = 0x77, 0x99
COPY = ("BYTES=16", *COMMON_DEFINES)


class OnGpu:
    """Host memory that says it is a GPU's."""

    is_cuda = True
    device = torch.device("cuda", 0)

    def __init__(self, tensor: Any) -> None:
        self.tensor = tensor
        self.data_ptr = tensor.data_ptr


class Stream:
    """A stream of torch's, which logs whom it waits for."""

    def __init__(self, driver: Driver, handle: int) -> None:
        self.cuda_stream, self.device, self._log = handle, OnGpu.device, driver.log

    def wait_stream(self, other: Stream) -> None:
        self._log.append(("wait", self.cuda_stream, other.cuda_stream))


class Bench:
    """Torch's part, and a check of each launch against the kernel's own signature."""

    def __init__(self, driver: Driver) -> None:
        self.driver, self.current = driver, Stream(driver, COMPUTE)
        self.side = Stream(driver, SIDE)
        self.mismatches: list[str] = []
        number = int(driver.architecture.removeprefix("sm_"))
        torch.cuda.device = lambda _: contextlib.nullcontext()
        torch.cuda.current_stream = lambda *_: self.current
        torch.cuda.get_device_capability = lambda _: divmod(number, 10)
        launch.side_stream = lambda _: self.side
        here = calls.uploaded
        calls.uploaded = ops.uploaded = lambda tensors, _: here(tensors, "cpu")
        moves.run = device.run = self.run

    def run(self, call: Any) -> None:
        self.driver.expect(call.kernel, call.defines)
        launch.run(call)
        said = [ctypes.sizeof(value) for value in call.args]
        *_, states = next(e for e in reversed(self.driver.log) if e[0] == "launch")
        if said != states:
            self.mismatches.append(f"{call.kernel}: {said} instead of {states}")


def twin(layout: KvLayout) -> tuple[PagedKv, PagedKv]:
    """The same memory as a GPU's and as the host's."""
    plain = new_memory(layout)
    plain.memory.normal_()
    return PagedKv(OnGpu(plain.memory), layout), plain


def copied(way: int, to_host: bool) -> bool:
    cache, plain = twin(CACHE)
    blocks = Blocks(cache, BLOCKS)
    arena, want = new_memory(CACHE.record(3)), new_memory(CACHE.record(3))
    if to_host:
        reference.copy_blocks(Blocks(plain, BLOCKS), Blocks(want, RECORDS))
        moves.copy_by(way, cache, arena, moves.block_runs(blocks, Blocks(arena, RECORDS)))
        return torch.equal(arena.memory, want.memory)
    arena.memory.normal_()
    expected = new_memory(CACHE)
    expected.memory.copy_(plain.memory)
    reference.copy_blocks(Blocks(arena, RECORDS), Blocks(expected, BLOCKS))
    moves.copy_by(way, arena, cache, moves.block_runs(Blocks(arena, RECORDS), blocks))
    return torch.equal(plain.memory, expected.memory)


def spliced() -> bool:
    cache, plain = twin(CACHE)
    arena, want = new_memory(CACHE.record(3)), new_memory(CACHE)
    arena.memory.normal_()
    want.memory.copy_(plain.memory)
    old, new = torch.arange(48), torch.randperm(192)[:48]
    delta = torch.randint(-3, 4, (48,)) * 100
    moves.splice_by(2, arena, cache, SlotMap(old, new, delta), ROPE)
    reference.splice(arena, want, SlotMap(old, new, delta), ROPE)
    return torch.equal(plain.memory.view(torch.int16), want.memory.view(torch.int16))


def attended(bench: Bench) -> bool:
    cache, plain = twin(CACHE)
    queries = torch.randn(2, 4, 64)
    table, lengths = torch.tensor([[1, 4, 6], [2, 3, 0]]), torch.tensor([40, 21])
    call, mass = calls.attention_mass_call(cache, 1, queries, table, lengths, 0.1)
    bench.run(call)
    want = attention.attention_mass(plain, 1, queries, table, lengths, 0.1)
    return torch.allclose(mass.mean(1), want, atol=1e-4)


def sampled() -> bool:
    """What a sampled step of an engine launches for the layers that it looks at."""
    cache, plain = twin(CACHE)
    looks = [measuring.LayerQuery(layer, torch.randn(4, 64), 0.125) for layer in range(2)]
    table, real = torch.tensor([5, 2, 9]), device.device_of
    device.device_of = lambda *_: torch.device("cpu")  # where this torch can make its tensors
    mass = measuring.attended(cache, looks, table, 35)
    device.device_of = real
    return torch.allclose(mass, measuring.attended(plain, looks, table, 35), atol=1e-4)


def confident(bench: Bench) -> bool:
    logits = torch.randn(3, 501)
    call, out = calls.confidence_call(logits)
    bench.run(replace(call, held=(OnGpu(logits), *call.held)))
    return torch.allclose(out[:, 0], attention.confidence(logits).entropy, atol=1e-4)


def error_of(act: Callable[[], Any]) -> str:
    try:
        act()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return ""


def refusals(bench: Bench) -> dict[str, str]:
    """What goes wrong if the attribute is not set, or the device cannot give so much."""
    real, launch.allow_shared = launch.allow_shared, lambda *_: None
    launch.loaded_kernel.cache_clear()
    kernel = 2  # thread blocks
    without = error_of(lambda: copied(kernel, True))
    said = bench.driver.refused[-1] if bench.driver.refused else ""
    launch.allow_shared = real
    launch.loaded_kernel.cache_clear()
    small, calls.THREADS = calls.THREADS, 1024
    too_much = error_of(lambda: copied(kernel, True))
    calls.THREADS = small
    return {"without the attribute": without, "said": said, "too much": too_much}


def main(options: dict[str, Any]) -> dict[str, Any]:
    torch.manual_seed(3)
    driver = Driver(**options)
    bench = Bench(driver)
    if refused := error_of(lambda: launch.loaded_kernel("copy_runs", COPY, 0, 0)):
        return {"refused to load": refused}
    kernel = 2  # thread blocks
    right = {
        "spill by a kernel": copied(kernel, True),
        "warm by a kernel": copied(kernel, False),
        "spill by the copy engine": copied(COPY_ENGINE, True),
        "warm by the copy engine": copied(COPY_ENGINE, False),
        "splice": spliced(),
        "attention": attended(bench),
        "a sampled step": sampled(),
        "confidence": confident(bench),
    }
    before = len(driver.log)
    bench.current = Stream(driver, 0)
    right["copies beside the default stream"] = copied(COPY_ENGINE, True)
    right["a kernel on the default stream"] = copied(kernel, True)
    return {
        "right": right,
        "log": driver.log[:before],
        "default stream": driver.log[before:],
        "refused": list(driver.refused),
        "mismatches": bench.mismatches,
        "problem": copy_engine.copy_engine().problem,
        "refusals": _refusals_on_a_stream(bench),
    }


def _refusals_on_a_stream(bench: Bench) -> dict[str, str]:
    bench.current = Stream(bench.driver, COMPUTE)
    return refusals(bench)


if __name__ == "__main__":
    for options in sys.argv[1:]:
        if child := os.fork():
            _, status = os.waitpid(child, 0)
            if status:
                sys.exit(f"{options} ended with {os.waitstatus_to_exitcode(status)}")
            continue
        try:
            sys.stdout.write(f"\nRESULT {json.dumps(main(json.loads(options)))}\n")
            sys.stdout.flush()
        except BaseException:
            traceback.print_exc()
            os._exit(1)
        os._exit(0)  # the driver must not be called after Python's end
