"""The arena's handles and slabs, and the disk tier under damage."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from kvgraph.kernels import disk as disk_module
from kvgraph.kernels.arena import Arena
from kvgraph.kernels.disk import KEY_BYTES, DiskTier, remove_unused
from kvgraph.kernels.errors import LayoutError, SlotError, StorageError, TransferError
from kvgraph.kernels.layout_engines import cpu_layout

CACHE = cpu_layout("vec", 2, 6, 2, 32, 32)
SIZE = CACHE.block_bytes


def new_arena(records: int = 6, **options: Any) -> Arena:
    return Arena(CACHE.record(records), pin=False, **options)


def test_a_budget_is_a_number_of_records() -> None:
    arena = Arena.for_cache(CACHE, 5 * SIZE + 1)
    assert arena.capacity == 5
    assert arena.committed_bytes == 0
    assert Arena.for_cache(CACHE, 5 * SIZE, int8=True).capacity == 8
    with pytest.raises(LayoutError, match="does not hold a block"):
        Arena.for_cache(CACHE, SIZE - 1)


def test_more_than_is_free_is_refused_and_takes_nothing() -> None:
    arena = new_arena(4)
    arena.allocate(3)
    assert not arena.can_allocate(2)
    with pytest.raises(SlotError, match="2 records asked for, 1 are free"):
        arena.allocate(2)
    assert arena.used == 3


def test_a_stale_handle_is_noticed() -> None:
    arena = new_arena(1)
    old = arena.allocate(1)
    arena.free(old)
    new = arena.allocate(1)
    assert arena.slots(new) == 0
    assert old[0] != new[0]
    assert not arena.valid(old)[0]
    for use in (arena.slots, arena.free, lambda handles: arena.record_view(handles[0])):
        with pytest.raises(SlotError, match="1 of 1 records were freed"):
            use(old)


def test_freeing_twice_frees_nothing() -> None:
    arena = new_arena()
    handles = arena.allocate(2)
    with pytest.raises(SlotError, match="twice"):
        arena.free([handles[0], handles[0]])
    assert arena.used == 2


def test_empty_slabs_go_back_to_the_machine() -> None:
    arena = new_arena(6, slab_bytes=2 * SIZE)
    handles = arena.allocate(6)
    arena.kv.memory.fill_(1)
    assert arena.committed_bytes == 6 * SIZE
    arena.free(handles[2:5])
    assert arena.committed_bytes == 4 * SIZE
    bytes_of = [bytes(arena.record_view(h)) for h in handles[[0, 1, 5]]]
    assert all(any(data) for data in bytes_of)
    assert not any(bytes(arena.record_view(arena.allocate(1)[0])))
    arena.check_integrity()


@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 9), st.randoms()), max_size=30))
def test_records_are_never_shared(steps: list[Any]) -> None:
    arena, held = new_arena(11, slab_bytes=3 * SIZE), dict[int, int]()
    for number, (take, count, random) in enumerate(steps):
        if take and arena.can_allocate(count):
            for handle in arena.allocate(count).tolist():
                assert handle not in held
                held[handle] = number
                arena.record_view(handle)[:8] = number.to_bytes(8, "little")
        elif held:
            gone = random.sample(sorted(held), min(count, len(held)))
            arena.free(gone)
            for handle in gone:
                del held[handle]
        arena.check_integrity()
        assert arena.used == len(held)
        assert len(np.unique(arena.slots(list(held)))) == len(held)
    for handle, number in held.items():
        assert int.from_bytes(arena.record_view(handle)[:8], "little") == number


class Cuda:
    """Two calls of CUDA's; refuses what overlaps, and more than there is room for."""

    def __init__(self, patch: pytest.MonkeyPatch, room: int) -> None:
        self.locked: dict[int, int] = {}
        self.calls: list[str] = []
        self._room = room
        patch.setattr(torch.cuda, "cudart", lambda: self)
        patch.setattr(torch.cuda, "check_error", self._check)

    def cudaHostRegister(self, address: int, size: int, flags: int) -> int:  # noqa: N802
        self.calls.append("lock")
        if address in self.locked or len(self.locked) == self._room:
            return 2
        self.locked[address] = size
        return 0

    def cudaHostUnregister(self, address: int) -> int:  # noqa: N802
        self.calls.append("unlock")
        return 0 if self.locked.pop(address, None) else 713

    def _check(self, result: int) -> None:
        if result:
            raise RuntimeError("out of memory")


def pinned_arena(slabs: int) -> Arena:
    each = new_arena(1, slab_bytes=1).per_slab
    return Arena(CACHE.record(slabs * each), pin=True, slab_bytes=1)


def test_all_is_page_locked_at_the_start_and_nothing_while_records_come_and_go(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The driver holds up every launch of the engine meanwhile."""
    cuda = Cuda(monkeypatch, room=9)
    arena = pinned_arena(4)
    size = arena.per_slab * arena.record_bytes
    start = arena.kv.memory.data_ptr()
    assert cuda.locked == {start + slab * size: size for slab in range(4)}
    assert arena.committed_bytes == 4 * size
    assert arena.problem is None
    for _ in range(3):
        arena.free(arena.allocate(arena.capacity))
        arena.check_integrity()
    assert cuda.calls == ["lock"] * 4
    arena.close()
    assert not cuda.locked
    assert cuda.calls == ["lock"] * 4 + ["unlock"] * 4


@pytest.mark.parametrize(("room", "kept"), [(6, 2), (59, 53)])
def test_an_arena_has_what_the_machine_lets_it_lock_and_says_why_it_is_less(
    monkeypatch: pytest.MonkeyPatch, room: int, kept: int
) -> None:
    """Some of it is left to the engine, which page-locks buffers of its own later."""
    cuda = Cuda(monkeypatch, room)
    arena = pinned_arena(60)
    assert len(cuda.locked) == kept
    assert arena.capacity == arena.kv.layout.blocks == kept * arena.per_slab
    assert arena.committed_bytes == arena.capacity * arena.record_bytes
    assert "page-locked: out of memory" in str(arena.problem)
    arena.free(arena.allocate(arena.capacity))
    with pytest.raises(SlotError, match="are free"):
        arena.allocate(arena.capacity + 1)
    arena.check_integrity()
    assert len(arena.kv.memory) == arena.kv.layout.elements
    del arena
    assert not cuda.locked, "an arena that is forgotten unlocks what it had locked"


@pytest.mark.parametrize("room", [0, 3, 4])
def test_where_next_to_nothing_can_be_locked_there_is_no_arena(
    monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    cuda = Cuda(monkeypatch, room)
    with pytest.raises(TransferError, match="page-locked: out of memory"):
        pinned_arena(60)
    assert not cuda.locked


def name(number: int) -> bytes:
    """A key that ends in zero bytes, as hashes may."""
    return number.to_bytes(KEY_BYTES, "little")


def record(number: int) -> bytes:
    return np.random.default_rng(number).bytes(SIZE)


def new_disk(path: Path, capacity: int = 4, identity: str = "model") -> DiskTier:
    return DiskTier(path / "kv.records", SIZE, capacity, identity)


def write(disk: DiskTier, number: int) -> bool:
    return disk.write(name(number), record(number))


def whole(disk: DiskTier, number: int) -> bool:
    """Whether a key is found; if so it must be what was written."""
    into = bytearray(SIZE)
    found = disk.read(name(number), into)
    assert not found or bytes(into) == record(number)
    return found


def test_records_survive_a_restart_and_the_oldest_go_first(tmp_path: Path) -> None:
    disk = new_disk(tmp_path)
    for key in (1, 2, 3, 4):
        assert write(disk, key)
    assert whole(disk, 1)
    write(disk, 2**64 - 1)
    disk.close()
    again = new_disk(tmp_path)
    assert set(again) == {name(key) for key in (1, 3, 4, 2**64 - 1)}
    assert all(whole(again, key) for key in (1, 3, 4, 2**64 - 1))
    assert not whole(again, 2)
    assert (tmp_path / "kv.records").stat().st_mode & 0o077 == 0
    again.close()


def test_what_a_file_holds_once_it_is_disowned_no_later_process_finds(tmp_path: Path) -> None:
    disk = new_disk(tmp_path)
    write(disk, 1)
    disk.disown()
    assert whole(disk, 1), "this process goes on with it"
    assert write(disk, 2)
    assert whole(disk, 2)
    disk.close()
    again = new_disk(tmp_path)
    assert len(again) == 0
    write(again, 3)
    again.close()
    third = new_disk(tmp_path)
    assert set(third) == {name(3)}, "it was another process's to disown"
    third.close()


def test_a_disk_that_cannot_note_that_it_is_disowned_takes_nothing_more(
    tmp_path: Path, monkeypatch: Any
) -> None:
    def refuse(*_: Any) -> int:
        raise OSError(5, "Input/output error")

    disk = new_disk(tmp_path)
    write(disk, 1)
    monkeypatch.setattr(os, "pwrite", refuse)
    disk.disown()
    monkeypatch.undo()
    assert disk.failed == 1
    assert not write(disk, 2)
    disk.close()
    again = new_disk(tmp_path)
    assert set(again) == {name(1)}
    again.close()


def test_files_that_nobody_has_open_are_removed(tmp_path: Path) -> None:
    disk = new_disk(tmp_path)
    for other in ("one", "two"):
        (tmp_path / other).write_bytes(b"old")
    paths = [tmp_path / other for other in ("kv.records", "one", "two")]
    assert remove_unused([*paths, tmp_path / "gone"]) == paths[1:], "others may remove them too"
    assert [path.exists() for path in paths] == [True, False, False]
    disk.close()


def test_a_file_that_may_not_be_removed_hides_no_other(tmp_path: Path, monkeypatch: Any) -> None:
    paths = [tmp_path / other for other in ("theirs", "old")]
    for path in paths:
        path.write_bytes(b"old")
    unlink = Path.unlink

    def refuse(path: Path) -> None:
        if path == paths[0]:
            raise PermissionError(errno.EACCES, "Permission denied")
        unlink(path)

    monkeypatch.setattr(Path, "unlink", refuse)
    assert remove_unused(paths) == paths[1:]


def test_a_link_in_a_files_place_is_not_followed(tmp_path: Path) -> None:
    """Its target would be emptied, and filled with records."""
    target = tmp_path / "precious"
    target.write_bytes(b"mine")
    (tmp_path / "kv.records").symlink_to(target)
    with pytest.raises(StorageError, match=r"kv\.records"):
        new_disk(tmp_path)
    assert target.read_bytes() == b"mine"


@pytest.mark.parametrize("what", [".", "kv.records"])
def test_what_another_user_owns_is_not_read(tmp_path: Path, monkeypatch: Any, what: str) -> None:
    """The records' checksums have no key."""
    new_disk(tmp_path).close()
    if os.geteuid() == 0:
        os.chown(tmp_path / what, 65_534, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 54_321)
    with pytest.raises(StorageError, match="belongs to user"):
        new_disk(tmp_path)


@pytest.mark.parametrize(("mode", "opens"), [(0o777, False), (0o1777, True)])
def test_a_directory_for_everybody_must_keep_each_users_files(
    tmp_path: Path, mode: int, opens: bool
) -> None:
    tmp_path.chmod(mode)
    if opens:
        return new_disk(tmp_path).close()
    with pytest.raises(StorageError, match="every user can write"):
        new_disk(tmp_path)


@pytest.mark.parametrize("change", ["identity", "capacity"])
def test_bytes_of_another_model_are_never_matched(tmp_path: Path, change: str) -> None:
    disk = new_disk(tmp_path)
    write(disk, 1)
    disk.close()
    other = {"identity": "another"} if change == "identity" else {"capacity": 5}
    disk = new_disk(tmp_path, **other)  # type: ignore[arg-type]
    assert len(disk) == 0
    disk.close()


def test_damage_anywhere_costs_a_record_and_gives_no_wrong_one(tmp_path: Path) -> None:
    random = np.random.default_rng(7)
    path = tmp_path / "kv.records"
    disk = new_disk(tmp_path)
    for key in (1, 2, 3):
        write(disk, key)
    disk.close()
    sound = path.read_bytes()
    lost = 0
    for _ in range(150):
        data = bytearray(sound)
        # Half of the damage strikes header and index, which are a thousandth of the file.
        at = int(random.integers(0, 4300 if random.random() < 0.5 else len(data)))
        data[at] ^= 1 << int(random.integers(8))
        path.write_bytes(data)
        disk = new_disk(tmp_path)
        lost += sum(not whole(disk, key) for key in (1, 2, 3))
        assert write(disk, 9)
        assert whole(disk, 9)
        disk.close()
    assert lost > 0


@pytest.mark.parametrize("kept", [0, 10, 4096, 5000, 9000])
def test_a_file_cut_short_opens_with_what_is_whole(tmp_path: Path, kept: int) -> None:
    disk = new_disk(tmp_path)
    write(disk, 1)
    disk.close()
    os.truncate(tmp_path / "kv.records", kept)
    disk = new_disk(tmp_path)
    assert not whole(disk, 1)
    assert write(disk, 1)
    assert whole(disk, 1)
    disk.close()


def test_a_write_cut_off_leaves_nothing_half_written(tmp_path: Path, monkeypatch: Any) -> None:
    """Killed, or out of space, after any number of bytes: the old record is gone, none is torn."""
    for budget in range(0, SIZE + 60, 977):
        path = tmp_path / str(budget)
        disk = new_disk(path, capacity=1)
        write(disk, 1)
        left, real = budget, os.pwrite

        def scarce(file: int, data: Any, at: int, real: Any = real) -> int:
            nonlocal left
            part = bytes(data)[:left]
            left -= len(part)
            return int(real(file, part, at)) if part else 0

        monkeypatch.setattr(os, "pwrite", scarce)
        assert not write(disk, 2)
        monkeypatch.undo()
        assert disk.failed == 1
        assert not whole(disk, 2)
        disk.close()
        again = new_disk(path, capacity=1)
        assert not whole(again, 2)
        whole(again, 1)  # the right bytes or none
        again.close()


def test_an_age_that_no_file_reaches_costs_its_record_alone(tmp_path: Path) -> None:
    """No checksum covers it, and one that cannot grow would fail each read and write."""
    disk = new_disk(tmp_path)
    for key in (1, 2, 3):
        write(disk, key)
    disk.close()
    path = tmp_path / "kv.records"
    data = path.read_bytes()
    at = data.index(name(2)) + KEY_BYTES
    path.write_bytes(data[:at] + b"\xff" * 8 + data[at + 8 :])
    disk = new_disk(tmp_path)
    assert [whole(disk, key) for key in (1, 2, 3)] == [True, False, True]
    assert all(write(disk, key) and whole(disk, key) for key in (4, 5, 6))
    assert len(disk) == 4
    disk.close()


def test_a_key_that_stands_twice_takes_one_place(tmp_path: Path, monkeypatch: Any) -> None:
    """The disk refused to erase it, and it was written again elsewhere."""
    disk = new_disk(tmp_path)
    write(disk, 1)
    monkeypatch.setattr(os, "pwrite", lambda *_: 0)
    disk.remove(name(1))
    monkeypatch.undo()
    write(disk, 1)
    disk.close()
    disk = new_disk(tmp_path)
    assert whole(disk, 1)
    for key in (2, 3, 4):
        assert write(disk, key)
    assert all(whole(disk, key) for key in (1, 2, 3, 4)), "all four places are of use"
    disk.close()


def test_a_place_is_found_without_looking_at_every_record(tmp_path: Path, monkeypatch: Any) -> None:
    disk = DiskTier(tmp_path / "kv.records", 16, 100_000, "model")
    looked_at: list[Any] = []
    monkeypatch.setattr(np, "argmin", looked_at.append)
    for number in range(200):
        assert disk.write(name(number), bytes(16))
    assert not looked_at
    disk.close()


def test_places_are_used_again_whatever_happened_to_what_stood_there(
    tmp_path: Path, monkeypatch: Any
) -> None:
    random, real = np.random.default_rng(11), os.pwrite
    disk, newest = new_disk(tmp_path, capacity=5), dict[int, None]()
    for _ in range(400):
        number, act = int(random.integers(12)), random.random()
        if act < 0.6:
            assert write(disk, number)
            newest.pop(number, None)
            newest[number] = None
            newest = dict.fromkeys(list(newest)[-5:])
        elif act < 0.8:
            disk.remove(name(number))
            newest.pop(number, None)
        elif act < 0.9 and whole(disk, number):
            newest[number] = newest.pop(number)
        elif act > 0.95:
            monkeypatch.setattr(os, "pwrite", lambda *_: 0)
            lost = number if name(number) in disk else next(iter(newest), None)
            assert not write(disk, number)
            if lost == number or len(newest) == 5:
                newest.pop(lost, None)
            monkeypatch.setattr(os, "pwrite", real)
        assert set(disk) == {name(number) for number in newest}
    disk.close()


def test_where_a_filesystem_cannot_reserve_nothing_is_written_to_make_room(
    tmp_path: Path, monkeypatch: Any
) -> None:
    """A network's would otherwise be written full at the start: for hours."""

    def unable(*_: Any) -> int:
        ctypes.set_errno(errno.EOPNOTSUPP)
        return -1

    def hours(*_: Any) -> None:
        raise AssertionError("this writes every block")

    monkeypatch.setattr(disk_module, "_libc", lambda: SimpleNamespace(fallocate=unable))
    monkeypatch.setattr(os, "posix_fallocate", hours)
    disk = DiskTier(tmp_path / "kv.records", 1 << 20, 64, "model")
    assert (tmp_path / "kv.records").stat().st_blocks * 512 < 1 << 20
    assert disk.write(name(1), bytes(1 << 20))
    disk.close()
    with pytest.raises(StorageError, match="No space left"):
        DiskTier(tmp_path / "large", 1 << 40, 1 << 12, "model")


def test_nothing_but_a_whole_hash_is_a_key(tmp_path: Path) -> None:
    disk = new_disk(tmp_path)
    write(disk, 1)
    near = bytearray(name(1))
    near[-1] ^= 1
    assert bytes(near) not in disk, "all of the key counts, its last byte too"
    for key, said in ((b"short", "5 bytes"), (b"", "0 bytes"), (bytes(33), "33 bytes"), (7, "int")):
        for use in (disk.read, disk.write):
            with pytest.raises(StorageError, match=rf"{said}.*exactly 32"):
                use(key, bytearray(SIZE))  # type: ignore[arg-type]
        with pytest.raises(StorageError, match=said):
            disk.remove(key)  # type: ignore[arg-type]
    assert len(disk) == 1
    disk.close()


def test_what_cannot_be_opened_is_named(tmp_path: Path) -> None:
    disk = new_disk(tmp_path)
    with pytest.raises(StorageError, match=r"kv.records.*another process"):
        new_disk(tmp_path)
    disk.close()
    with pytest.raises(StorageError, match="disk tier"):
        DiskTier(tmp_path / "kv.records" / "below", SIZE, 1, "")
    with pytest.raises(StorageError, match="disk tier"):
        DiskTier(tmp_path / "large", 1 << 40, 1 << 12, "")
