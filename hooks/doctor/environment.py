"""Checks of an engine's environment: the switch, hints, admission, sampling, tiers, recall."""

from __future__ import annotations

import importlib
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from ...graph.errors import ConfigError
from ...kernels.disk import strangers_problem
from ...kernels.errors import KernelError, StorageError
from ..recall.gate import calibration_file, kept_calibrations
from ..requests.borders import read_sections, read_table
from ..requests.ends import read_marks
from ..requests.hints import HintPolicy, HintTrust, exposed_secret, read_hint_policy
from ..settings import (
    ADMISSION_VARIABLE,
    COLD_VARIABLE,
    DIRECTORY_VARIABLE,
    DISK_SUFFIX,
    ENDS_VARIABLE,
    HINTS_VARIABLE,
    HOLD_MAX_VARIABLE,
    LAYERS_VARIABLE,
    ON,
    PREFIX,
    PROTECT_STALE_VARIABLE,
    RECALL_SHARED_VARIABLE,
    RECALL_VARIABLE,
    REFUSE_AFTER_VARIABLE,
    RUST_FRONTEND_VARIABLE,
    SAMPLING_VARIABLE,
    STORE_GIB_VARIABLE,
    STORE_VARIABLE,
    SWITCH_VARIABLE,
    WARM_VARIABLE,
    WITHOUT_API,
    StoreSettings,
    TierSettings,
    engine_settings,
    has_python_api,
    unknown_variables,
)
from ..store.stores import open_store
from ..tiers.host import share_of

CORRECT: Final = "correct the variable, or unset it"
_DEFAULT: Final = "its default would be taken"


@dataclass(frozen=True, slots=True)
class Check:
    """A result; ``ok``: None where it does not apply; ok with a remedy is a warning."""

    name: str
    ok: bool | None
    detail: str
    remedy: str = ""

    def line(self) -> str:
        mark = {True: "warn" if self.remedy else "ok  ", False: "FAIL", None: "–   "}[self.ok]
        remedy = f"\n       → {self.remedy}" if self.remedy else ""
        return f"{mark} {self.name}: {self.detail}{remedy}"


def check_switch() -> Check:
    settings = engine_settings()
    if complaint := settings.complaint("graph"):
        return Check("switch", False, complaint, CORRECT)
    if settings.graph:
        return Check("switch", True, f"{SWITCH_VARIABLE} is set")
    return Check("switch", None, f"off; engines start stock until {SWITCH_VARIABLE}=1 is set")


def check_variables() -> Check:
    if unknown := unknown_variables(os.environ):
        detail = f"kvgraph reads no such variable: {', '.join(unknown)}"
        return Check("variables", True, detail, "correct the name, or unset it")
    return Check("variables", True, f"all that begin with {PREFIX} are known")


def check_hints() -> Check:
    settings = engine_settings()
    try:
        policy = read_hint_policy(settings)
    except ConfigError as error:
        detail = f"{error}; an engine that is started so believes nobody"
        return Check("hints", False, detail, CORRECT)
    if exposed := exposed_secret(settings):
        return Check("hints", True, exposed.problem, exposed.remedy)
    return Check("hints", True, f"{HINTS_VARIABLE} is {policy.name}")


def check_layers() -> Check:
    settings = engine_settings()
    if complaint := settings.complaint("layers"):
        return Check("layers", False, complaint, CORRECT)
    if not settings.reads_layers:
        return Check(
            "layers", None, f"off by {LAYERS_VARIABLE}: parts of prompts are not told apart"
        )
    try:
        read_sections(settings.sections)
    except ValueError as error:
        return Check("layers", False, f"{error}; {_DEFAULT}", CORRECT)
    try:
        if settings.layers.startswith("{"):
            read_table(settings.layers)
        policy = read_hint_policy(settings)
    except ConfigError:
        policy = HintPolicy(HintTrust.OFF)
    except ValueError as error:
        return Check("layers", False, f"{LAYERS_VARIABLE} is not understood: {error}", CORRECT)
    hints = "counts" if policy.trust is HintTrust.ALL else "counts if it comes with the secret"
    if policy.trust is not HintTrust.ALL and policy.secret is None:
        hints = f"does not count: {HINTS_VARIABLE}=all, or secret:FILE, believes it"
    if not has_python_api():
        hints = f"is not read: {RUST_FRONTEND_VARIABLE} is set"
    said = f"what callers say of messages {hints}"
    return Check("layers", True, f"on: parts of prompts are told apart; {said}")


def check_frontend() -> Check:
    if has_python_api():
        return Check("frontend", True, "vLLM's own, in Python")
    return Check("frontend", True, WITHOUT_API, f"unset {RUST_FRONTEND_VARIABLE} if you need that")


def check_ends() -> Check:
    settings = engine_settings()
    if not settings.reads_ends:
        return Check("ends", None, f"off by {ENDS_VARIABLE}: nobody reads why answers end")
    if settings.ends.lower() in ("", *ON):
        return Check("ends", True, "why answers end is read, by the marks of the chat template")
    try:
        read_marks(settings.ends)
    except ValueError as error:
        return Check("ends", False, f"{ENDS_VARIABLE} is not understood: {error}", CORRECT)
    return Check("ends", True, f"why answers end is read, by the marks in {ENDS_VARIABLE}")


def check_admission() -> Check:
    settings = engine_settings()
    if complaint := settings.complaint("admission"):
        return Check("admission", False, complaint, CORRECT)
    if complaint := settings.complaint("hold_max_s", "refuse_after_s"):
        return Check("admission", False, f"{complaint}; {_DEFAULT}", CORRECT)
    if settings.admission:
        return Check("admission", True, "on: in overload, new sessions wait for room")
    off, stated = "off: no request is ever held", settings.model_fields_set
    if stated & {"hold_max_s", "refuse_after_s"}:
        name = HOLD_MAX_VARIABLE if "hold_max_s" in stated else REFUSE_AFTER_VARIABLE
        return Check("admission", True, f"{off}, though {name} is set", f"{ADMISSION_VARIABLE}=1")
    return Check("admission", None, f"{off}; {ADMISSION_VARIABLE}=1 holds new sessions in overload")


def check_protection() -> Check:
    settings = engine_settings()
    if complaint := settings.complaint("protect_stale_s"):
        return Check("protection", False, f"{complaint}; {_DEFAULT}", CORRECT)
    return Check("protection", True, f"{PROTECT_STALE_VARIABLE} is {settings.protect_stale_s:g} s")


def check_sampling() -> Check:
    settings = engine_settings()
    if complaint := settings.complaint("sampling"):
        return Check("sampling", False, complaint, CORRECT)
    if not settings.sampling:
        return Check("sampling", None, f"off; {SAMPLING_VARIABLE}=1 samples decode steps")
    share = f"{settings.sampling:.1%} of a worker's CPU time"
    return Check("sampling", True, f"may take {share}, on a GPU of its decode steps' time")


def check_tiers() -> Check:
    try:
        tiers = engine_settings().tiers()
    except ConfigError as error:
        return Check("tiers", False, str(error), CORRECT)
    if tiers is None:
        return Check("tiers", None, f"off; {WARM_VARIABLE}=GiB keeps evicted blocks in host memory")
    from ...kernels.ops import chosen  # not above: it loads torch

    try:
        chosen()
    except KernelError as error:
        return Check("tiers", False, str(error), CORRECT)
    if tiers.cold_dir is not None and (problem := _disk_problem(tiers.cold_dir, tiers.cold_bytes)):
        return Check("tiers", False, problem, f"change {DIRECTORY_VARIABLE} or {COLD_VARIABLE}")
    return _memory(tiers)


def check_store() -> Check:
    try:
        store = engine_settings().shared_store()
    except ConfigError as error:
        return Check("shared store", False, str(error), CORRECT)
    if store is None:
        off = f"off; {STORE_VARIABLE}=DIRECTORY lets engines share what they computed"
        return Check("shared store", None, off)
    if store.is_mooncake:
        return _mooncake(store)
    try:
        open_store(store).close()
    except StorageError as error:
        return Check("shared store", False, str(error), f"change {STORE_VARIABLE}")
    room, free = store.capacity_bytes, shutil.disk_usage(store.place).free
    present = sum(file.stat().st_size for file in Path(store.place).glob("*/*/*"))
    detail = f"{store.place}, {_gib(present)} of {_gib(room)} GiB"
    if free + present < room:
        detail = f"{detail}; only {_gib(free)} GiB are free there"
        return Check("shared store", True, detail, f"lower {STORE_GIB_VARIABLE}")
    return Check("shared store", True, detail)


def _mooncake(store: StoreSettings) -> Check:
    try:  # the client that asks adds no memory
        open_store(store, adds=False).close()
    except StorageError as error:
        return Check("shared store", False, str(error), f"change {STORE_VARIABLE}")
    detail = f"{store.place} answers; each worker adds {_gib(store.capacity_bytes)} GiB"
    return Check("shared store", True, detail)


def _memory(tiers: TierSettings) -> Check:
    """What a worker gets of the configured memory; an engine caps it in the same way."""
    disk = f", {_gib(tiers.cold_bytes)} GiB in {tiers.cold_dir}" if tiers.cold_dir else ""
    given = share_of(tiers.warm_bytes, 1)
    if given == tiers.warm_bytes:
        return Check("tiers", True, f"{_gib(given)} GiB of host memory per worker{disk}")
    detail = (
        f"{_gib(tiers.warm_bytes)} GiB of host memory per worker asked for; one worker would be "
        f"capped at {_gib(given)} GiB of what is free now, several share it{disk}"
    )
    return Check("tiers", True, detail, f"lower {WARM_VARIABLE}, or free memory")


def _disk_problem(directory: Path, wanted: int) -> str | None:
    nearest = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not os.access(nearest, os.W_OK):
        return f"{nearest} cannot be written"
    if nearest == directory and (problem := strangers_problem(directory.stat())):
        return f"{directory}: {problem}"
    present = sum(file.stat().st_size for file in directory.glob(f"*{DISK_SUFFIX}"))
    free = shutil.disk_usage(nearest).free + present  # our own files are there already
    return f"{nearest} has {_gib(free)} GiB free of {_gib(wanted)}" if free < wanted else None


def _gib(size: int) -> str:
    return f"{size / 2**30:.1f}"


NAME = "sidecar's compiled part"
_MODULE = "kvgraph._graph"


def check_compiled() -> Check:
    try:
        importlib.import_module(_MODULE)
    except ImportError as error:
        return Check(
            NAME,
            None,
            f"{_MODULE} is not there ({error}): engines run here, a sidecar cannot",
            "install a wheel for this platform, or a C++ compiler and then kvgraph once more",
        )
    return Check(NAME, True, f"{_MODULE} is there")


_CALIBRATE: Final = "kvgraph calibrate MODEL"
_NAMED: Final = 4  # models named in a result; chosen


def check_recall() -> Check:
    settings = engine_settings()
    if complaint := settings.complaint("recall", "recall_shared", "recall_always"):
        return Check("recall", False, complaint, CORRECT)
    value = settings.recall
    if value is False:
        return Check("recall", None, f"off by {RECALL_VARIABLE}")
    whose = "for every request" if value else "for requests that ask"
    if settings.recall_shared:
        whose += f", all of one domain but for salts and tenants ({RECALL_SHARED_VARIABLE})"
    passed, told = _models()
    if not _has_tiers():
        detail = f"{whose}, but there are no tiers to read copies from; {told}"
        return Check("recall", False if value else None, detail, f"set {WARM_VARIABLE}=GiB")
    if not passed:
        return Check("recall", False if value else None, f"{whose}; {told}", _CALIBRATE)
    return Check("recall", True if value else None, f"{whose}; {told}")


def recall_of(config: Any) -> str:
    """Return whether an engine of this ``VllmConfig`` can have recall, as a sentence's end."""
    from ..vllm.recall.support import calibration_for

    if engine_settings().recall is False:
        return ""
    try:
        return f"; recall: {calibration_for(config).reason}"
    except (ConfigError, KernelError) as error:
        return f"; no recall: {error}"


def _models() -> tuple[int, str]:
    directory = calibration_file("").parent
    kept = kept_calibrations(directory)
    passed = [each.model for each in kept if each.passed]
    failed = [f"{each.model} ({each.reason})" for each in kept if not each.passed]
    parts = [f"passed: {_list(passed)}"] if passed else []
    parts += [f"did not pass: {_list(failed)}"] if failed else []
    return len(passed), f"{'; '.join(parts) or 'no calibrated model'} (in {directory})"


def _list(names: list[str]) -> str:
    more = f" and {len(names) - _NAMED} more" if len(names) > _NAMED else ""
    return ", ".join(names[:_NAMED]) + more


def _has_tiers() -> bool:
    try:
        return engine_settings().tiers() is not None
    except ConfigError:
        return False
