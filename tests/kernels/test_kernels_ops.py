"""What callers see: checked arguments, rotations, a back end that works and was measured."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from kvgraph.kernels import ops
from kvgraph.kernels.backends import native, reference
from kvgraph.kernels.compilers import CACHE_ENV, compiled
from kvgraph.kernels.errors import BuildError, KernelError, RopeError, SlotError
from kvgraph.kernels.gpu.moves import COPY_CELLS, COPY_ENGINE, COPY_WAYS, measured
from kvgraph.kernels.layout import Blocks, SlotMap, new_memory
from kvgraph.kernels.layout_engines import cpu_layout
from kvgraph.kernels.rope import Pairing, Rope, rope_from_config
from transformers import LlamaConfig
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

LAYOUT = cpu_layout("vec", 2, 3, 2, 32, 32)
ROPE = Rope(10_000.0 ** (-torch.arange(0, 32, 2, dtype=torch.float64) / 32))


def test_numbers_out_of_range_move_nothing() -> None:
    cache, arena = new_memory(LAYOUT), new_memory(LAYOUT.record(2))
    cache.memory.fill_(1)
    one = torch.tensor([1])
    for blocks, records, complaint in (
        (torch.tensor([3]), one, "block 3 .* 0 to 2"),
        (torch.tensor([-1]), one, "block -1"),
        (one, torch.tensor([2]), "record 2 .* 0 to 1"),
        (torch.tensor([0, 1]), one, r"lengths \[1, 2\]"),
    ):
        with pytest.raises(SlotError, match=complaint):
            ops.spill(Blocks(cache, blocks), Blocks(arena, records))
        with pytest.raises(SlotError, match=complaint):
            ops.load(Blocks(arena, records), Blocks(cache, blocks))
    with pytest.raises(SlotError, match="slot 96"):
        ops.splice(arena, cache, SlotMap(one, torch.tensor([96]), one), ROPE)
    assert not arena.memory.any()


@pytest.fixture
def undecided() -> Iterator[None]:
    """No back end chosen yet, and none left chosen."""
    for decided in (ops.fastest, ops.native_problem):
        decided.cache_clear()
    yield
    for decided in (ops.fastest, ops.native_problem):
        decided.cache_clear()


def test_without_a_compiler_torch_does_it(undecided: None, monkeypatch: Any) -> None:
    def refuse(*_: Any) -> None:
        raise BuildError("no C++ compiler found")

    monkeypatch.setattr(native, "library", refuse)
    cache, arena = new_memory(LAYOUT), new_memory(LAYOUT.record(2))
    assert ops.backend(cache) is reference
    assert ops.native_problem() == "no C++ compiler found"
    cache.memory.fill_(1)
    ops.prepare(cache, arena)
    ops.spill(Blocks(cache, torch.tensor([2])), Blocks(arena, torch.tensor([1])))
    assert int(arena.memory.count_nonzero()) == LAYOUT.block_bytes // 2


def test_the_switch_is_explained_and_obeyed_for_good(undecided: None, monkeypatch: Any) -> None:
    cache = new_memory(LAYOUT)
    monkeypatch.setenv(ops.SWITCH, "fast")
    for _ in range(2):
        with pytest.raises(KernelError, match=r"fast.*auto, reference"):
            ops.backend(cache)
    monkeypatch.setenv(ops.SWITCH, "reference")
    assert ops.backend(cache) is reference
    monkeypatch.setenv(ops.SWITCH, " ")
    assert ops.backend(cache) is reference, "chosen once"
    assert ops.chosen() == "auto", "as if unset"


def test_the_method_is_what_was_measured_nearest() -> None:
    def seconds(way: int, size: int, count: int) -> float:
        assert size * count <= 64 << 20
        if way == COPY_ENGINE:
            return count * (1e-5 + size / 50e9)
        return count * (1e-6 + size / min(way * 0.4e9, 20e9))

    table = measured(seconds, COPY_WAYS, COPY_CELLS)
    assert table.best(2 << 20, 1) == COPY_ENGINE
    assert table.best(3000, 5000) != COPY_ENGINE
    assert table.best(8 << 20, 100_000) == COPY_ENGINE
    assert table.best(2048, 4096) == 64, "no more thread blocks than help"


KERNELS = Path(__file__).parents[2] / "kernels"


def test_kernels_need_torch_and_numpy_compile_nothing_and_leave_cuda_alone(cache: Path) -> None:
    """Without its bindings, and on a CPU without a context."""
    modules = [
        ".".join(["kvgraph.kernels", *path.relative_to(KERNELS).with_suffix("").parts])
        for path in sorted(KERNELS.rglob("*.py"))
    ]
    code = f"""
import importlib, sys, torch
missing = ("msgspec", "zmq", "orjson", "vllm", "typer", "rich", "fastapi", "prometheus_client")
sys.modules.update(dict.fromkeys(["cuda", *missing]))
for name in {modules!r}:
    importlib.import_module(name)
from kvgraph.kernels.gpu.streams import TransferStream, mark
cpu = torch.device("cpu")
TransferStream(cpu, first=True).run(mark(cpu), lambda: None).wait()
assert not torch.cuda.is_initialized()
"""
    subprocess.run([sys.executable, "-P", "-c", code], check=True)
    assert not cache.exists()


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: Any) -> Path:
    monkeypatch.setenv(CACHE_ENV, str(tmp_path / "kernels"))
    return tmp_path / "kernels"


def test_many_who_ask_at_once_build_once() -> None:
    builds = []

    def build(path: Path) -> None:
        builds.append(path)
        path.write_text("machine code")

    with ThreadPoolExecutor(8) as pool:
        paths = set(pool.map(lambda _: compiled("k.so", ["source"], build), range(32)))
    assert len(builds) == 1
    assert [path.read_text() for path in paths] == ["machine code"]
    compiled("k.so", ["another source"], build)
    assert len(builds) == 2


def test_a_build_that_fails_leaves_nothing_behind(cache: Path) -> None:
    def fail(path: Path) -> None:
        path.write_text("half of the machine co")
        raise BuildError("the compiler died")

    with pytest.raises(BuildError, match="died"):
        compiled("k.so", ["source"], fail)
    assert [path.suffix for path in cache.iterdir()] == [".lock"]
    made = compiled("k.so", ["source"], lambda path: path.touch())
    assert made.exists()
    assert cache.stat().st_mode & 0o077 == 0


LLAMA3 = {
    "rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}  # fmt: skip
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768}


def config(**rope: Any) -> LlamaConfig:
    return LlamaConfig(
        hidden_size=512, num_attention_heads=4, num_key_value_heads=2, head_dim=128,
        max_position_embeddings=rope.pop("longest", 131072),
        rope_parameters={"rope_theta": 500000.0, **rope},
    )  # fmt: skip


@pytest.mark.parametrize(
    "rope",
    [{"rope_type": "linear", "factor": 3.0}, LLAMA3, YARN,
     {**YARN, "beta_fast": 16, "beta_slow": 2, "truncate": False},
     {**YARN, "partial_rotary_factor": 0.5}],
    ids=["linear", "llama3", "yarn", "yarn-betas", "yarn-partial"],
)  # fmt: skip
def test_frequencies_are_those_of_transformers(rope: dict[str, Any]) -> None:
    model = config(**rope)
    theirs, _ = ROPE_INIT_FUNCTIONS[rope["rope_type"]](model, "cpu")
    mine = rope_from_config(model).inv_freq
    assert mine.dtype == torch.float64
    torch.testing.assert_close(mine.float(), theirs, rtol=2e-6, atol=0)


def test_default_and_partial_rotation() -> None:
    whole = rope_from_config(config(rope_type="default"))
    exact = 500000.0 ** (-torch.arange(0, 128, 2, dtype=torch.float64) / 128)
    torch.testing.assert_close(whole.inv_freq, exact, rtol=1e-6, atol=0)
    half = rope_from_config(config(rope_type="default", partial_rotary_factor=0.5))
    assert (whole.dims, half.dims, half.start) == (128, 64, 0)


def test_older_configurations_keep_their_settings_elsewhere() -> None:
    old = {
        "model_type": "llama", "hidden_size": 512, "num_attention_heads": 4, "rope_theta": 5e5,
        "max_position_embeddings": 131072, "rope_scaling": {**YARN, "type": "yarn"},
    }  # fmt: skip
    new = rope_from_config(config(**YARN))
    assert torch.equal(rope_from_config(old).inv_freq, new.inv_freq)


def test_mla_rotates_the_tail_of_the_latent_in_neighbouring_pairs() -> None:
    rope = rope_from_config({
        "model_type": "deepseek_v3", "kv_lora_rank": 512, "qk_rope_head_dim": 64,
        "rope_theta": 10000.0, "hidden_size": 7168, "num_attention_heads": 128,
    })  # fmt: skip
    assert (rope.start, rope.dims, rope.pairing) == (512, 64, Pairing.GPTJ)


def test_attention_factor_is_no_part_of_the_rotation() -> None:
    rope = rope_from_config(config(**YARN, attention_factor=1.7))
    cos, sin = rope.rotation(torch.tensor([12345]))
    torch.testing.assert_close(cos**2 + sin**2, torch.ones_like(cos))


@pytest.mark.parametrize(
    ("settings", "longest", "reason"),
    [
        ({"model_type": "bloom"}, None, "bloom.*ALiBi"),
        ({"model_type": "falcon", "alibi": True, "rope_theta": 1e4}, None, "falcon.*ALiBi"),
        ({"model_type": "gpt2"}, None, "gpt2.*learned"),
        ({"model_type": "t5"}, None, "t5.*no rope_theta"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, 8192,
         "llama: dynamic NTK changes its frequencies beyond 4096.*8192"),
        ({"model_type": "phi3", "rope_scaling": {"rope_type": "longrope"}}, None,
         "phi3: LongRoPE.*4096.*unknown"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "linear"}}, None,
         "llama.*linear.*factor"),
        ({"model_type": "llama", "rope_scaling": {"rope_type": "spiral"}}, None,
         "llama.*spiral.*yarn"),
        ({"model_type": "gemma3", "rope_parameters": {"full_attention": {"rope_theta": 1e6}}}, None,
         "gemma3.*layer type.*full_attention"),
    ],
)  # fmt: skip
def test_refusals_name_model_and_reason(
    settings: dict[str, Any], longest: int | None, reason: str
) -> None:
    base: dict[str, Any] = {
        "hidden_size": 512, "num_attention_heads": 4, "max_position_embeddings": 4096
    }  # fmt: skip
    if "rope_scaling" in settings:
        base["rope_theta"] = 1e4
    with pytest.raises(RopeError, match=reason):
        rope_from_config(base | settings, max_model_len=longest)


def test_variants_that_cannot_change_within_the_served_length_are_accepted() -> None:
    for kind in (
        {"rope_type": "dynamic", "factor": 2.0},
        {"rope_type": "longrope", "short_factor": [1.5] * 64, "long_factor": [9.0] * 64},
    ):
        settings = {
            "model_type": "phi3", "hidden_size": 512, "num_attention_heads": 4, "rope_theta": 1e4,
            "max_position_embeddings": 131072, "original_max_position_embeddings": 4096,
            "rope_scaling": kind,
        }  # fmt: skip
        rope = rope_from_config(settings, max_model_len=4096)
        assert rope.inv_freq[0] == pytest.approx(1.0 if kind["rope_type"] == "dynamic" else 1 / 1.5)
