"""A shared store of files: what it gives back is what was asked for, or nothing."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from kvgraph.graph.errors import ConfigError
from kvgraph.hooks.settings import EngineSettings, StoreSettings, TierSettings
from kvgraph.hooks.store.sealed import SLOW_S, SealedRecords, StoreBreaker, store_key
from kvgraph.hooks.store.stores import DirectoryStore, MooncakeStore
from kvgraph.kernels.errors import StorageError
from kvgraph_bench.fleet.apart import APART
from kvgraph_bench.fleet.mooncake_processes import why_not

SIZE = 4096
ROOM = 16 * 40 * SIZE


def key(number: int) -> bytes:
    return number.to_bytes(2, "big") * 16


class Broken(DirectoryStore):
    """Fails each call, and counts them."""

    calls = 0

    def holds(self, keys: object) -> list[bool]:
        self.calls += 1
        raise OSError("down")

    def get(self, key: str, parts: object) -> bool:
        self.calls += 1
        raise OSError("down")


def records(path: Path, name: str = "model", room: int = ROOM) -> SealedRecords:
    return SealedRecords(DirectoryStore(str(path / "s"), room), name)


def read(from_: SealedRecords, number: int) -> bytes | None:
    into = bytearray(SIZE)
    return bytes(into) if from_.read(key(number), into) else None


def write(to: SealedRecords, *numbers: int, value: bytes = bytes(SIZE)) -> None:
    """Give values to a store, each of which it takes."""
    for number in numbers:
        assert to.write(key(number), value)


def path_of(root: Path, number: int) -> Path:
    (found,) = (root / "s").glob(f"*/model/{key(number).hex()}.kv")
    return found


def test_another_process_reads_what_one_wrote_and_does_not_send_it_again(tmp_path: Path) -> None:
    one, two, written = records(tmp_path), records(tmp_path), os.urandom(SIZE)
    write(one, 1, value=written)
    assert read(two, 1) == written
    assert read(two, 2) is None
    assert read(records(tmp_path, "other"), 1) is None
    write(two, 1, value=written)
    assert (one.spared, two.spared) == (0, 1)


@pytest.mark.parametrize("damage", ["other block", "other model", "one bit", "cut", "empty"])
def test_whatever_is_not_the_block_is_refused_and_removed(tmp_path: Path, damage: str) -> None:
    store = records(tmp_path)
    name = "other" if damage == "other model" else "model"
    for number in (1, 2):
        write(records(tmp_path, name), number, value=bytes([number]) * SIZE)
    (source,) = (tmp_path / "s").glob(f"*/{name}/{key(2).hex()}.kv")
    target = tmp_path / "s" / "0" / "model" / f"{key(1).hex()}.kv"
    target.parent.mkdir(exist_ok=True)
    content = source.read_bytes()
    if damage == "one bit":
        content = target.read_bytes()[:-1] + b"\0"
    target.write_bytes({"cut": content[:-1], "empty": b""}.get(damage, content))
    assert read(store, 1) is None
    if damage not in ("cut", "empty"):  # these are seen by their size, and overwritten
        assert store.damaged == 1
        assert not target.exists()


def test_a_full_store_forgets_what_was_unused_longest(tmp_path: Path) -> None:
    store = records(tmp_path, room=16 * 20 * SIZE)
    numbers = list(range(60))  # of one part
    for number in numbers:
        write(store, number)
        os.utime(path_of(tmp_path, number), (number, number))
    kept = [number for number in numbers if read(store, number) is not None]
    assert kept == numbers[-len(kept) :]
    assert 15 <= len(kept) <= 21


def test_what_a_killed_engine_left_unfinished_is_never_found_and_goes(tmp_path: Path) -> None:
    store = records(tmp_path, room=16 * 20 * SIZE)
    store.write(key(1), bytes(SIZE))
    folder = tmp_path / "s" / "0" / "model"
    left = folder / f"{key(2).hex()}.77-0.tmp"
    left.write_bytes(b"half")
    os.utime(left, (1, 1))
    assert read(store, 2) is None
    write(store, *range(10, 40))
    assert not left.exists()


def test_two_engines_that_write_one_value_at_once_both_can(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = records(tmp_path), records(tmp_path)
    opened = os.open

    def others_write_meanwhile(path: Path, flags: int, mode: int = 0o777) -> int:
        file = opened(path, flags, mode)
        monkeypatch.setattr(os, "open", opened)
        write(two, 1)
        return file

    monkeypatch.setattr(os, "open", others_write_meanwhile)
    write(one, 1)
    monkeypatch.setattr(os, "open", opened)
    assert read(records(tmp_path), 1) == bytes(SIZE)


def test_a_value_without_room_is_not_taken(tmp_path: Path) -> None:
    assert not records(tmp_path, room=SIZE).write(key(1), bytes(SIZE))


def test_who_may_be_someone_else_s_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    for mode in (0o777, 0o1777):  # as in /tmp, where files of others stay theirs
        (tmp_path / "s").chmod(mode)
        with pytest.raises(StorageError, match="every user"):
            records(tmp_path)
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match="Not a directory"):
        DirectoryStore(str(tmp_path / "file" / "s"), ROOM)


def test_a_directory_of_another_user_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever owns it can put forged values there; the checksum has no key."""
    (tmp_path / "s").mkdir(mode=0o755)
    records(tmp_path)
    if os.geteuid() == 0:
        os.chown(tmp_path / "s", 65_534, -1)
    else:
        monkeypatch.setattr(os, "geteuid", lambda: 54_321)
    with pytest.raises(StorageError, match="belongs to user"):
        records(tmp_path)


def test_after_a_reset_it_neither_gives_nor_takes(tmp_path: Path) -> None:
    store = records(tmp_path)
    write(store, 1)
    store.disown()
    assert read(store, 1) is None
    assert not store.write(key(2), bytes(SIZE))
    assert read(records(tmp_path), 2) is None


def test_a_store_that_fails_is_left_alone_and_tried_again(tmp_path: Path) -> None:
    now = [0.0]
    broken = Broken(str(tmp_path / "s"), ROOM)
    store = SealedRecords(broken, "model", lambda: now[0])
    for times, calls in ((10, 1), (1, 2)):
        for _ in range(times):
            assert read(store, 1) is None
            assert not store.write(key(1), bytes(SIZE))
        assert broken.calls == calls
        now[0] += 1.5


def test_slow_calls_count_as_failed_ones() -> None:
    now = [0.0]
    breaker = StoreBreaker(lambda: now[0])
    breaker.succeeded(SLOW_S / 2)
    assert breaker.allows()
    breaker.succeeded(2 * SLOW_S)
    assert not breaker.allows()
    now[0] += 1.1
    assert breaker.allows(), "the first who asks after the rest tries"
    assert not breaker.allows(), "and nobody else until it is known what came of it"
    breaker.succeeded(0.0)
    assert breaker.allows()


def test_calls_that_fail_together_make_one_rest() -> None:
    now = [0.0]
    breaker = StoreBreaker(lambda: now[0])
    for rest_s in (1.0, 2.0, 4.0):
        for _ in range(5):
            breaker.failed()
        now[0] += rest_s - 0.1
        assert not breaker.allows()
        now[0] += 0.2
        assert breaker.allows()
    assert breaker.broken == 3


def test_a_key_of_any_length_is_named_alike(tmp_path: Path) -> None:
    store, short = records(tmp_path), b"\x01" * 16
    store.write(short.ljust(32, b"\0"), bytes(SIZE))
    name = store_key("model", short)
    assert DirectoryStore(str(tmp_path / "s"), ROOM).holds([name]) == [True]


@pytest.mark.parametrize(
    ("variables", "problem"),
    [
        ({}, "needs AITHER_KVCACHE_STORE_GIB"),
        ({"_GIB": "much"}, "'much'; allowed: GiB"),
        ({"": "here", "_GIB": "1"}, "an absolute path"),
        ({"": "mooncake://h:1", "_GIB": "1"}, "AITHER_KVCACHE_STORE_OPEN=1 allows it"),
        ({"_AT": "never"}, "'never'; allowed: turn, eviction"),
        ({"_SALTED": "maybe"}, "'maybe'; allowed: 1 or 0"),
    ],
)
def test_what_is_not_allowed_is_said(variables: dict[str, str], problem: str) -> None:
    asked = {f"AITHER_KVCACHE_STORE{name}": each for name, each in ({"": "/s"} | variables).items()}
    with pytest.raises(ConfigError, match=problem):
        EngineSettings.read(asked).shared_store()


def test_settings_are_read_and_survive_an_engines_configuration() -> None:
    asked = {
        "AITHER_KVCACHE_WARM_GIB": "1", "AITHER_KVCACHE_STORE": "/srv/kv",
        "AITHER_KVCACHE_STORE_GIB": "2", "AITHER_KVCACHE_STORE_AT": "eviction",
    }  # fmt: skip
    tiers = EngineSettings.read(asked).tiers()
    assert tiers == TierSettings(1 << 30, store=StoreSettings("/srv/kv", 2 << 30, False))
    assert TierSettings.from_plain(tiers.plain()) == tiers
    with pytest.raises(ConfigError, match="needs AITHER_KVCACHE_WARM_GIB"):
        EngineSettings.read({**asked, "AITHER_KVCACHE_WARM_GIB": ""}).tiers()


@pytest.mark.parametrize("put", ["truncated", "longer", "link", "link to nothing", "folder"])
def test_what_is_no_value_makes_room_for_one(tmp_path: Path, put: str) -> None:
    store, whole = records(tmp_path), os.urandom(SIZE)
    write(store, 1, 2, value=whole)
    path, target = path_of(tmp_path, 1), tmp_path / "elsewhere"
    if put in ("truncated", "longer"):
        os.truncate(path, 30 if put == "truncated" else 10 * SIZE)
    elif put == "folder":
        path.unlink()
        path.mkdir()
    else:
        target.write_bytes(path.read_bytes()) if put == "link" else None
        path.unlink()
        path.symlink_to(target)
    assert read(store, 1) is None
    assert read(store, 2) == whole, "the store is well"
    if put != "folder":
        write(store, 1, value=whole)
        assert store.spared == 0
        assert read(records(tmp_path), 1) == whole


def test_a_pipe_in_a_values_place_is_not_waited_for(tmp_path: Path) -> None:
    store, found = records(tmp_path), list[bytes | None]()
    write(store, 1)
    path = path_of(tmp_path, 1)
    path.unlink()
    os.mkfifo(path)
    reader = threading.Thread(target=lambda: found.append(read(store, 1)), daemon=True)
    reader.start()
    reader.join(10.0)
    assert found == [None]
    write(store, 1)
    assert read(store, 1) == bytes(SIZE)


def test_a_folder_of_another_user_holds_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one, two = records(tmp_path), records(tmp_path)
    write(one, 1)
    folder, exists = path_of(tmp_path, 1).parent, Path.exists

    def refuse(path: Path) -> bool:
        if path.parent == folder:
            raise PermissionError(errno.EACCES, "Permission denied")
        return exists(path)

    monkeypatch.setattr(Path, "exists", refuse)
    store = DirectoryStore(str(tmp_path / "s"), ROOM)
    assert store.holds([store_key("model", key(1))]) == [False]
    assert two.write(key(1), bytes(SIZE)), "it is no failure of the store"


def test_what_a_clock_that_went_back_wrote_does_not_stay_for_ever(tmp_path: Path) -> None:
    """By its time it was used last of all: whatever is written later would go before it."""
    store, ahead = records(tmp_path, room=16 * 20 * SIZE), time.time() + 1e8
    for number in range(60):
        write(store, number)
        if number < 15:
            os.utime(path_of(tmp_path, number), (ahead, ahead))
    assert [number for number in range(15) if read(store, number) is not None] == []
    assert all(read(store, number) is not None for number in range(50, 60))


def test_a_clock_that_went_back_takes_no_value_that_is_being_written(tmp_path: Path) -> None:
    store = records(tmp_path, room=16 * 20 * SIZE)
    write(store, 1)
    ahead = time.time() + 1e8
    os.utime(path_of(tmp_path, 1), (ahead, ahead))
    begun = tmp_path / "s" / "0" / "model" / f"{key(2).hex()}.77-0.tmp"
    begun.write_bytes(b"half")
    write(store, *range(10, 40))
    assert begun.exists()


class Full(DirectoryStore):
    """Has no room."""

    def put(self, key: str, parts: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")


def test_a_full_store_can_be_read(tmp_path: Path) -> None:
    write(records(tmp_path), 1)
    full = SealedRecords(Full(str(tmp_path / "s"), ROOM), "model")
    for number in range(2, 12):
        assert not full.write(key(number), bytes(SIZE))
        assert read(full, 1) == bytes(SIZE)


def test_workers_that_come_and_go_stay_within_the_room(tmp_path: Path) -> None:
    for number in range(400):
        write(records(tmp_path, room=16 * 4 * SIZE), number)
    size = sum(path.stat().st_size for path in (tmp_path / "s").rglob("*.kv"))
    assert size < 16 * 6 * SIZE


def test_what_is_not_the_stores_is_left_alone(tmp_path: Path) -> None:
    store = records(tmp_path, room=16 * 4 * SIZE)
    write(store, 0)
    outside = tmp_path / "outside"
    outside.mkdir()
    mine = [tmp_path / "s" / "0" / "cache" / "mine", outside / "old.kv"]
    mine[0].parent.mkdir()
    for path in mine:
        path.write_bytes(bytes(10 * SIZE))
        os.utime(path, (0, 0))
    (tmp_path / "s" / "f").symlink_to(outside)
    write(store, *range(1, 40), *range(0xF000, 0xF028))
    assert all(path.exists() for path in mine)


def test_a_group_shares_what_is_in_its_directory(tmp_path: Path) -> None:
    (tmp_path / "s").mkdir()
    (tmp_path / "s").chmod(0o770)
    write(records(tmp_path), 1)
    path = path_of(tmp_path, 1)
    modes = [each.stat().st_mode & 0o777 for each in (path, path.parent, path.parent.parent)]
    assert modes == [0o660, 0o770, 0o770]


def test_what_may_not_be_read_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = records(tmp_path)
    write(store, 1)
    path, opened = path_of(tmp_path, 1), os.open

    def refuse(name: Path, flags: int, *more: int) -> int:
        if str(name) == str(path) and not flags & os.O_CREAT:
            raise PermissionError(errno.EACCES, "Permission denied")
        return opened(name, flags, *more)

    monkeypatch.setattr(os, "open", refuse)
    assert read(store, 1) is None
    assert path.exists(), "it may be another user's"
    assert not store.breaker.rests


PROGRAM = Path(__file__).parent / "programs" / "mooncake_pair.py"


@pytest.fixture(scope="module")
def pair() -> Any:
    """What two clients of one master found, until the owner of a value and the master died."""
    if reason := why_not():
        pytest.skip(reason)
    command = [*APART, sys.executable, "-P", str(PROGRAM)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, env=os.environ)
    (line,) = [each for each in done.stdout.splitlines() if each.startswith("RESULT ")]
    return json.loads(line.removeprefix("RESULT "))


def test_one_client_reads_what_another_wrote_and_not_once_that_is_dead(pair: Any) -> None:
    assert pair["read"]
    assert pair["missing"] is False
    assert pair["holds"] == [True, False]
    assert pair["spared"] == 1, "what is there is not sent again"
    assert pair["owner_dead"] is False


def test_a_dead_master_is_asked_once(pair: Any) -> None:
    assert pair["master_dead"] == [False] * 5
    assert pair["refused_s"] < 0.5, "only the first call waits for it"
    assert pair["longest_gap_s"] < 1.0, "and no other thread waits with it"


@pytest.mark.parametrize(
    ("place", "problem"),
    [("mooncake://nowhere", "HOST:PORT"), ("mooncake://127.0.0.1:1", "refused|libibverbs|pip")],
)
def test_without_a_master_an_engine_starts_all_the_same(place: str, problem: str) -> None:
    with pytest.raises(StorageError, match=problem):
        MooncakeStore(place, 0)
