"""Mends, each taken out again: does a test say so?

``kvgraph bench faults mends`` copies the tree, and for each entry of ``MENDS`` replaces the mend by
what stood there before, or by what a slip of the pen would make of it, and runs the entry's tests.
A mend whose tests then still pass is one that the next change may lose.
"""
# ruff: noqa: E501 -- an entry is a line

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final, NamedTuple

from ..errors import BenchError, InputError
from ..figures import Figures
from .faults import Say, Size

ROOT: Final = Path(__file__).parents[3]
_LEFT_OUT: Final = (".*", "__pycache__", "node_modules", "build", "*.egg-info")
_MOST_S: Final = 900.0  # of an entry's tests; chosen: several times the longest
_PASSED, _FAILED, _OTHERWISE = 0, 1, 2  # what pytest returns; the last: nothing was tested


class Mend(NamedTuple):
    """A mend, and what shall notice that it is gone."""

    name: str  # of what it mends
    file: str  # where it stands, from the root
    old: str  # its text there, which stands there once
    new: str  # what the mutant has in its place
    tests: str  # pytest's arguments


_CHATS, _FILES = "advisor/memory/chats", "tests/memory/test_memory_files.py"
_CALLERS, _TOLD = "tests/memory/test_memory_callers.py", "tests/memory/test_memory_told.py"
_TRACES, _TRAFFIC = "tests/replay/test_replay_traces.py", "tests/replay/test_replay_traffic.py"
_READER, _FORMATS = "advisor/replay/reader.py", "advisor/replay/reader.py"
_WEKA, _PLANS = "advisor/replay/recorded_sessions.py", "advisor/replay/plan.py"
_CONF, _FAULTS = "tests/confkv/test_conf_generate.py", "tests/engine/test_engine_faults.py"
_KV_EVENTS = "tests/advisor/sockets/test_advisor_kv_events.py"
_SLICES = "tests/graph/slices/test_graph_slices.py"
_PAGE, _STORE = "tests/dashboards/test_dashboards_app.py", "tests/store/test_shared_store.py"
_SUBSCRIBER, _ROUTE = "tests/advisor/sockets/test_advisor_subscriber.py", "tests/fleet/route"
_NAMES, _WIRE = "tests/fleet/test_session_names.py", "tests/graph/test_wire.py"
_SNAPSHOT, _SHAPES = "tests/graph/test_graph_snapshot.py", "tests/hooks/vllm/test_hooks_shapes.py"
_ARENA, _LAB = "tests/kernels/test_kernels_arena.py", "tests/replay/test_replay_lab.py"
_CLI, _LAYERS = "tests/advisor/test_cli.py", "tests/hooks/vllm/layers/test_hooks_layers.py"
_HOSTILE, _RETRIES = f"{_ROUTE}/test_route_hostile.py", f"{_ROUTE}/test_route_retries.py"

# One line each, however long; what a later mend needs is one more line.
# fmt: off
MENDS: Final = (
    # Chats on disk
    Mend("no chats are taken from a directory of everybody's", "advisor/memory/store.py", "    if there.st_mode & stat.S_IWOTH:\n", "    if False:\n", f"{_FILES} -k every_user"),
    Mend("a damaged chat is no error", "advisor/memory/store.py", "except (OSError, *BAD_PAYLOAD, MemoryError) as error:", "except (OSError, msgspec.DecodeError) as error:", f"{_FILES} -k damaged"),
    Mend("a chat's digest is compared", "advisor/memory/store.py", "if head != _HEAD or _sum(data) != digest:", "if head != _HEAD:", f"{_FILES} -k damaged"),
    Mend("what cannot be read is set aside", "advisor/memory/store.py", "        os.replace(path, aside)\n", "        path.unlink()\n", f"{_FILES} -k 'damaged or others'"),
    Mend("unfinished files of others stay", "advisor/memory/store.py", "if _HEAD.startswith(head):", "if True:", f"{_FILES} -k others"),
    Mend("chats of others do not count", "advisor/memory/store.py", "if head == _HEAD:\n", "if True:\n", f"{_FILES} -k others"),
    Mend("a crowd sets no chat aside", "advisor/memory/store.py", "error.errno in _SCARCE:\n", "False:\n", f"{_FILES} -k crowd"),
    Mend("a chat without its text is not written", "advisor/memory/store.py", "        if is_whole and self._files is not None and chat.named:\n", "        if self._files is not None and chat.named:\n", f"{_CALLERS} -k crowd"),
    Mend("a deleted chat leaves nothing aside", "advisor/memory/command.py", "aside = proxy.store.forget_aside(caller_of(request.headers.raw), name)", "aside = False", f"{_FILES} -k damaged"),
    Mend("a full disk is in the status", "advisor/memory/store.py", "self.unwritten.add(chat.key)", "pass", f"{_FILES} -k disk"),
    Mend("what is not on disk leaves memory last", "advisor/memory/store.py", "key=lambda each: each[0] in unwritten", "key=lambda each: False", f"{_FILES} -k last"),
    Mend("a side question cuts no chat", "advisor/memory/proxy.py", "if not request.appends:", "if False:", f"{_FILES} -k side"),
    Mend("the chat is kept beside a side question", "advisor/memory/chat.py", "        return _linked(self, new, *kept), new\n", "        return _linked(new, *kept), new\n", f"{_FILES} -k first_turn_on"),
    Mend("a side question of a chat's later messages is no edit", "advisor/memory/chat.py", "        if best.goes_on or (mine and best.is_edited and 2 * best.common > best.known):\n", "        if best.goes_on or (mine and best.is_edited):\n", f"{_FILES} -k without"),
    Mend("a chat not yet continued is kept, too", "advisor/memory/chat.py", "key=lambda each: len(each.blocks))[-1:]", "key=lambda each: len(each.blocks))[:0]", f"{_FILES} -k first_turn_on"),
    Mend("the sidecar's probes go by several names", "dashboards/app.py", "for path in (\"/healthz\", \"/health\", \"/live\", \"/livez\", \"/ping\", \"/readyz\", \"/ready\"):", "for path in (\"/healthz\", \"/readyz\"):", "tests/dashboards/test_dashboards_app.py -k several_names"),
    # What goes into a prompt, and whose it is
    Mend("names in a prompt are escaped", "advisor/memory/chooser.py", "map(_plain, names[older:])", "names[older:]", _TOLD),
    Mend("each API key has a salt", "advisor/memory/requests.py", "salted = {CACHE_SALT: salt} if salt and ours.get(_RECALL) else {}", "salted = {}", _CALLERS),
    Mend("a client's own salt is not another's", "advisor/memory/proxy.py", "said = b\"\\0\".join([*keys, orjson.dumps(salt)])", "said = orjson.dumps(salt)", _CALLERS),
    Mend("a salt does not follow from a key", "advisor/memory/proxy.py", "digest_size=16, key=key[:64])", "digest_size=16)", _CALLERS),
    Mend("each API key has a salt by every API", "advisor/memory/requests.py", "return orjson.dumps(fields | {CACHE_SALT: salt}) if salt else body", "return body", f"{_CALLERS} -k 'whichever_api or own_form'"),
    Mend("recall is asked for wherever an engine hears it", "advisor/fleet/callers.py", "    return _stated(fields.get(XARGS)) | _stated(fields.get(\"kv_transfer_params\"))\n", "    return _stated(fields.get(\"kv_transfer_params\"))\n", f"{_CALLERS} -k wherever"),
    Mend("recall may be asked for as text", "advisor/fleet/callers.py", "            hints = orjson.loads(hints)\n", "            pass\n", f"{_CALLERS} -k wherever"),
    Mend("what a chat's own form says is said once", "advisor/memory/requests.py", "for name, value in xargs.items() if name != HINTS}\n", "for name, value in xargs.items()}\n", f"{_CALLERS} -k wherever"),
    # Rankings
    Mend("no block in use takes a victim's place", "graph/ranking/order.py", "open_to_loss & ~in_use, limit)", "open_to_loss, limit)", "tests/graph/ranking/test_graph_scoring.py -k are_not_named"),
    Mend("a block in use elsewhere can go", "graph/ranking/order.py", "    here &= sessions.engine[: sessions.size] == view.engine\n", "", "tests/graph/ranking/test_graph_scoring.py -k another_engine"),
    Mend("a block in use is worth a copy", "graph/ranking/order.py", "later = _highest(front, scores, open_to_loss & in_use, limit)", "later = _highest(front, scores, nothing, 0)", "tests/graph/ranking/test_graph_scoring.py tests/graph/ranking/test_graph_spill.py -k 'worth_copies or protected_last'"),
    Mend("a ranking that names no more is not looked at again", "hooks/vllm/free_queue/window.py", "        if self.is_exhausted:\n            return True\n", "", "tests/hooks/vllm/core/test_core_engine.py -k names_no_more"),
    # Traces and plans
    Mend("a child before its parent", _READER, "self._same[other] = one", "pass", f"{_TRACES} -k child"),
    Mend("a byte order mark", "advisor/replay/reader.py", "line = line.removeprefix(_MARK).strip()  #", "line = line.strip()  #", f"{_TRACES} -k mark"),
    Mend("a byte order mark in a session", "advisor/replay/reader.py", "return data.removeprefix(_MARK)", "return data", f"{_TRAFFIC} -k mark"),
    Mend("null is absent", _FORMATS, "output_length: Tokens | None = None", "output_length: Tokens = 0", f"{_TRACES} -k null"),
    Mend("a byte order mark of an appended file", _READER, "line = line.removeprefix(_MARK).strip()  #", "line = (line.removeprefix(_MARK) if number == 1 else line).strip()  #", f"{_TRACES} -k mark"),
    Mend("an array is a trace", _READER, "            if line.startswith(b\"[\"):", "            if False:", f"{_TRACES} -k array"),
    Mend("an array has a bound", _READER, "    if len(data) > MAX_ARRAY:", "    if False:", f"{_TRACES} -k bounded"),
    Mend("UTF-16 is read", _READER, "if file.peek(2).startswith(_UTF16) else file", "if False else file", f"{_TRACES} -k utf16"),
    Mend("a packed trace is named", _READER, "    if packed is not None:", "    if False:", f"{_TRACES} -k refused_in_words"),
    Mend("an empty cell is no session", _READER, " or name == \"\":  # an empty cell of a table", ":", f"{_TRACES} -k of_its_own"),
    Mend("an algorithm's least pool", "advisor/replay/fast.py", "    if capacity < (least := _LEAST.get(policy, 1)):", "    if capacity < (least := 0):", "tests/replay/test_replay_simulator.py -k too_small"),
    Mend("an algorithm's window has a block", "advisor/replay/fast.py", "{\"window_size\": max(0.01, 1 / capacity)} if", "{} if", "tests/replay/test_replay_simulator.py -k 'differ or too_small'"),
    Mend("policies that agree are one note", "advisor/replay/tables.py", "alike.setdefault(tuple(row.values()), []).append(arm)", "alike[tuple(row.values())] = [arm]", f"{_LAB} -k pointed_out_once"),
    Mend("pools that are never full are one note", "advisor/replay/tables.py", "if trace.num_blocks > min(capacities):", "if True:", f"{_LAB} -k never_full"),
    Mend("empty cells of tables", _FORMATS, "filled = _EMPTY_CELL.sub(rb\"\\1null\", data)", "filled = data", f"{_TRACES} -k null"),
    Mend("numbers of tables", _FORMATS, "msgspec.json.Decoder(Line, strict=False)", "msgspec.json.Decoder(Line)", f"{_TRACES} -k null"),
    Mend("sessions without time stamps", _FORMATS, "timed=False)", "timed=True)", f"{_TRACES} -k stamps"),
    Mend("numbers of sixty-four bits", _WEKA, "hash_ids = array(\"Q\", entry.hash_ids)", "hash_ids = array(\"I\", entry.hash_ids)", f"{_TRAFFIC} -k bits"),
    Mend("numbers of all sessions", "advisor/replay/fleet_traffic.py", "if request.session.is_global and not request.session.harness:", "if False:", f"{_TRAFFIC} -k 'lap or global'"),
    Mend("a session without time ends", "advisor/replay/closed.py", "return max(LEAST_S, answers + pauses)", "return answers + pauses", f"{_TRAFFIC} -k ends"),
    Mend("a plan that refuses prompts", _PLANS, "if not row.refused and row.ttft_p95_s", "if row.ttft_p95_s", "tests/fleet/test_fleet_plans.py"),
    Mend("a plan's pools hold every prompt", "advisor/replay/plan.py", "terms, too_large = terms.for_trace(read)", "too_large = 0", "tests/fleet/test_fleet_plans.py"),
    # ConfKVCache
    Mend("latents are refused", "hooks/confkv/cache.py", "if getattr(text, \"kv_lora_rank\", None):", "if False:", f"{_CONF} -k latents"),
    Mend("a model that gives up its cache", "hooks/confkv/cache.py", "if drops_at is not None and text.max_position_embeddings > drops_at:", "if False:", f"{_CONF} -k 'gives_up'"),
    Mend("a mask with a bias is refused", "hooks/confkv/attention.py", "    if not bool((present | (newest <= torch.finfo(newest.dtype).min / 2)).all()):\n", "    if False:\n", f"{_CONF} -k bias"),
    Mend("an event of an unknown kind is told of", "graph/wire/kv_events.py", "                reason = f\"its kind is not known: {ascii(kind[:_LONGEST_KIND])[1:-1]}\"\n", "                continue\n", f"{_WIRE} -k batchs_time"),
    Mend("values of another width", "hooks/confkv/stores.py", "_room(keys, 0), _room(values, 0)", "_room(keys, 0), _room(keys, 0)", f"{_CONF} -k width"),
    # Tiers, and what vLLM is promised
    Mend("a reset disowns the disk", "hooks/tiers/mover.py", "self.lanes.disown()  # before", "pass  # before", "tests/tiers/test_tiers_mover.py -k belongs_to_no"),
    Mend("workers hear of a reset first", "hooks/vllm/tiers/bridge.py", "return TierWork(self.ledger.book.take() + broken, *voided)", "return TierWork(self.ledger.book.take() + broken)", "tests/tiers/test_tiers_spilling.py -k told_of_a_reset"),
    Mend("what workers are told may be new weights", "hooks/vllm/tiers/weights.py", "            if not (isinstance(method, str) and method in _LEAVE_WEIGHTS):\n", "            if False:\n", "tests/engine/test_engine_resets.py -k from_outside"),
    Mend("a version of weights is of new ones", "hooks/vllm/tiers/weights.py", "            _tell(_connector(self), \"set_weight_version\")\n", "            pass\n", "tests/engine/test_engine_resets.py -k trainer_gives"),
    Mend("a reset that is refused disowns the disk", "hooks/vllm/scheduler.py", "            self.tap.refused = self._give_up_copies\n", "", "tests/engine/test_engine_resets.py -k refused_leaves"),
    Mend("an adapter's blocks stay off the disk", "hooks/vllm/observer.py", "            self._named(unpack(pack_run(request.block_hashes, first, end, group.scale)))", "            pass", "tests/tiers/test_tiers_spilling.py -k adapter"),
    Mend("a picture that its client names stays off disks", "hooks/vllm/groups.py", "if not _OF_CONTENT.fullmatch(str(each.identifier))", "if False", "tests/tiers/test_tiers_spilling.py -k client_names"),
    Mend("a picture that its content names goes there", "hooks/vllm/groups.py", "if not _OF_CONTENT.fullmatch(str(each.identifier))", "", "tests/tiers/test_tiers_spilling.py -k client_names"),
    Mend("a picture that its client names is not shared", "hooks/vllm/groups.py", "if not _OF_CONTENT.fullmatch(str(each.identifier))", "if False", "tests/store/test_store_sharing.py -k forbids"),
    Mend("what was passed over is looked at again once it is worth a copy", "hooks/vllm/tiers/spiller.py", "return bool(self._passed[blocks].any())", "return False", "tests/tiers/test_tiers_spilling.py -k passed_over"),
    Mend("what a load reads makes room last", "hooks/vllm/tiers/loader.py", "    directory.reads(hashes)\n", "", "tests/tiers/test_tiers_loading.py -k full_disk"),
    Mend("a full memory makes way for a chain on disk", "hooks/vllm/tiers/loader.py", "            self._ledger.make_way(hashes[:count])\n", "", "tests/tiers/test_tiers_loading.py -k chain_on_disk"),
    Mend("what is on the wire is a sign of life", "advisor/sockets/subscriber.py", "if gone and self._socket.poll(_LAST_LOOK_MS):", "if False:", f"{_SUBSCRIBER} -k on_the_wire"),
    Mend("a silent engine is forgotten though others are heard", "advisor/sockets/subscriber.py", "gone = [peer for peer in gone if self._doubted[peer.identity] < self._emptied_at]", "gone = []", f"{_SUBSCRIBER} -k always_heard"),
    Mend("nothing makes way for who waits", "hooks/vllm/tiers/loader.py", " and self.load_victims.fit(count):  # else", ":  # else", "tests/tiers/test_tiers_loading.py -k has_to_wait"),
    Mend("what the disk has too makes way first", "hooks/tiers/ledger.py", "            oldest.sort(key=lambda copy: not directory.is_cold(copy.block_hash))\n", "", "tests/tiers/test_tiers_loading.py -k makes_way"),
    Mend("what a disk does not bring costs it alone", "hooks/tiers/lanes.py", "            reads.keys(),\n", "            all_of(job),\n", "tests/tiers/test_tiers_mover.py -k costs_nothing"),
    Mend("a disk that breaks costs it alone", "hooks/tiers/lanes.py", "                self._fail(job, part, rest, seconds, error)\n", "                self._refuse(job, seconds, error)\n", "tests/tiers/test_tiers_mover.py -k costs_nothing"),
    Mend("a load that nobody ordered fails", "hooks/vllm/tiers/bridge.py", "self._broken.append(_broken_load(request, blocks))", "pass", _FAULTS),
    Mend("promises are kept whatever fails", "hooks/vllm/tiers/bridge.py", "            finally:\n                self.promises.received(received)", "            except ZeroDivisionError:\n                self.promises.received(received)", "tests/engine/test_engine_resets.py -k void_load"),
    # Recall
    Mend("nothing approximate is registered", "hooks/vllm/recall/own_text.py", "num_tokens if limit is None else min(limit, num_tokens)", "num_tokens", "tests/recall/test_recall_engine.py -k registered"),
    Mend("a session's hashes follow from a nonce", "hooks/vllm/recall/opt_in.py", "nonce, plain = secrets.token_bytes(_NONCE_BYTES), hashes[exact]", "nonce, plain = b\"0\" * _NONCE_BYTES, hashes[exact]", "tests/recall/test_recall_engine.py -k two_sessions"),
    Mend("names that are cut stay several", "hooks/requests/hints.py", "    if name == value:\n", "    if True:\n", "tests/hooks/vllm/test_hooks_tagging.py -k stay_several"),
    Mend("a pipe is no calibration", "hooks/recall/gate.py", "        if path.exists() and not path.is_file():  # the", "        if False:  # the", "tests/recall/test_calibrate.py -k pipe"),
    Mend("recall is a named tenant's own", "hooks/vllm/recall/opt_in.py", "return salt or \"\", meaning.tenant or \"\", \"\"", "return salt or \"\", \"\", \"\"", "tests/recall/test_recall_engine.py -k named_tenants"),
    Mend("recall is a cache salt's own, whatever tenant is named", "hooks/vllm/recall/opt_in.py", "return salt or \"\", meaning.tenant", "return \"\", meaning.tenant", "tests/recall/test_recall_engine.py -k named_tenants"),
    Mend("recall is a cache salt's own, though the tenant is empty", "hooks/vllm/recall/opt_in.py", "if self._shared or salt or meaning.tenant:", "if self._shared or meaning.tenant:", "tests/recall/test_recall_engine.py -k named_tenants"),
    Mend("a reset forgets whose text it was", "hooks/vllm/recall/recall.py", "        self._index.clear()\n", "", "tests/recall/test_recall_engine.py -k after_a_reset"),
    Mend("a reset forgets what a session left", "hooks/vllm/recall/recall.py", "        self._branches.clear()\n        return True", "        return True", "tests/recall/test_recall_engine.py -k given_up_with_a_reset"),
    Mend("a reset forgets what was worth a copy", "hooks/tiers/ledger.py", "        self.wanted.clear()\n", "", "tests/recall/test_recall_engine.py -k worth_a_copy_before"),
    # The shared store
    Mend("a store that all may write to", "hooks/store/stores.py", "if mode & stat.S_IWOTH:", "if False:", _STORE),
    Mend("a link in a store", "hooks/store/stores.py", "os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW", "os.O_RDONLY | os.O_CLOEXEC", _STORE),
    Mend("a record's checksum", "hooks/store/sealed.py", "checksum = zlib.crc32(record, zlib.crc32(key, self._seed))", "checksum = zlib.crc32(key, self._seed)", _STORE),
    Mend("an engine with next to no memory shares", "hooks/vllm/tiers/sharing.py", "-(-self._ledger.directory.warm_capacity // _SHARE_OF_MEMORY)", "self._ledger.directory.warm_capacity // _SHARE_OF_MEMORY", "tests/store/test_store_sharing.py -k next_to_no"),
    Mend("an engine without memory has nothing to share", "hooks/vllm/tiers/sharing.py", "return self._room > 0 and bool(self._due or self._ready)", "return bool(self._due or self._ready)", "tests/store/test_store_sharing.py -k next_to_no"),
    # Who may say and see what
    Mend("one tenant's share of a pool", "graph/ranking/rules.py", "within = (theirs == NO_ROW) | (_sums_of_its_kind(theirs, costs) <= each)", "within = np.ones(len(theirs), dtype=np.bool_)", "tests/graph/ranking/test_graph_protection.py"),
    Mend("intents reach their tenant's blocks", "graph/intents.py", "rows = rows[blocks.tenant[rows] == tenant]", "pass", "tests/graph/intents tests/advisor/intents"),
    Mend("names and blocks need the token", "dashboards/access.py", "if not (self._is_bearer(authorization) or self._has_cookie(request)):", "if False:", _PAGE),
    Mend("an edge's weight below dotted keys", "advisor/config/edits.py", "inline = dotted or isinstance", "inline = isinstance", "tests/advisor/test_weight_edits.py -k any_form"),
    Mend("changes need the edit token", "dashboards/access.py", "if not _same(token, self._edit):", "if False:", "tests/advisor/test_weight_edits.py"),
    Mend("the door asks for a token", "advisor/sockets/front.py", "return len(request) == _PLAIN and hmac.compare_digest(request[-1], self._token)", "return len(request) == _PLAIN", "tests/advisor/sockets/test_advisor_keys.py -k token"),
    # What callers say costs others little, and nobody goes before others by a word
    Mend("a listed pool proves nothing", "advisor/policies/guard.py", "        self.unordered = int((tables.blocks.depth[rows] >= UNPLACED).sum())\n", "", "tests/policies/test_policies_guard.py -k another_order"),
    Mend("LRU finds no less than an engine that it ranks", "advisor/shadows/runner.py", "        if self.unordered > 0:", "        if False:", "tests/policies/test_policies_shadows.py -k no_order"),
    Mend("one request proves nothing for a policy", "advisor/policies/evidence.py", " and (self.ahead < 0 or self.ahead > self.most)", "", "tests/policies/test_policies_guard.py -k proves_nothing"),
    Mend("LRU takes over where it finds more in pool and memory together", "advisor/policies/guard.py", "return -self.evidence.ahead > max(beyond", "return False and max(beyond", "tests/policies/test_policies_guard.py -k more_under_it"),
    Mend("what an engine has copies of counts for the policy", "advisor/policies/guard.py", "min(walk.found + walk.copied, walk.reach)", "min(walk.found, walk.reach)", "tests/policies/test_policies_guard.py -k more_under_it"),
    Mend("LRU in an engine misses what is not copied in time", "advisor/policies/guard.py", "share = (self.found + least) / (self.findable + least)", "share = 1.0", "tests/policies/test_policies_guard.py -k not_copied_in_time"),
    Mend("the policy may try again", "advisor/policies/guard.py", "self.evidence.note(-lost, fade)", "self.evidence.note(-lost, 1.0)", "tests/policies/test_policies_guard.py -k more_under_it"),
    Mend("under LRU every block is worth a copy", "graph/ranking/order.py", "    elif lru:\n", "    elif False:\n", "tests/graph/ranking/test_graph_spill.py -k under_lru"),
    Mend("under LRU no advice drops copies", "graph/ranking/order.py", "idle = nothing if lru or not idle.any() else idle", "idle = idle if idle.any() else nothing", "tests/graph/ranking/test_graph_spill.py -k under_lru"),
    Mend("what callers state is bounded before its price is known", "hooks/vllm/free_queue/protection.py", "int(first_share(blocks - 1) * blocks)", "int(0.5 * blocks)", "tests/hooks/vllm/test_hooks_protecting.py -k unpriced"),
    Mend("callers state no more than rankings may protect", "hooks/vllm/free_queue/protection.py", "            self._most = ranking.may_keep\n", "            pass\n", "tests/hooks/vllm/test_hooks_protecting.py -k rankings_may"),
    Mend("what rankings protect counts against what callers state", "hooks/vllm/free_queue/protection.py", "room = self._stated, self._place, max(0, self._most - len(self._place))", "room = self._stated, self._place, self._most", "tests/hooks/vllm/test_hooks_protecting.py -k rankings_may"),
    Mend("of what callers state, a prompt's beginning stays", "hooks/vllm/free_queue/protection.py", "for key in reversed(keys):  #", "for key in keys:  #", "tests/hooks/vllm/test_hooks_protecting.py -k unpriced"),
    Mend("what is too dear is kept no longer", "advisor/policies/protection_price.py", "if self._now.share and self._now.is_dear(allowed):", "if False:", "tests/policies/test_policies_lifecycle.py"),
    Mend("holding does not end itself", "graph/admission.py", "self._met = queued or len(self._order) > 0", "self._met = queued", "tests/graph/test_graph_holding.py"),
    Mend("no prompt is measured for ever", "graph/admission.py", "return self._began is not None and now - self._began < self._most_s", "return self._began is not None", "tests/graph/test_graph_holding.py -k for_ever"),
    Mend("a limit that helped is trusted again", "advisor/admission.py", "self.limit, self._failed = None, 0  # it was of use", "self.limit = None", "tests/advisor/test_admission.py -k forgotten"),
    Mend("failures of other traffic are forgotten", "advisor/admission.py", "                    self._failed = 0  # nothing was lost", "                    pass  # nothing was lost", "tests/advisor/test_admission.py -k forgotten"),
    Mend("an idle engine computes no prompt", "graph/admission.py", "            self._pacing.give_up()\n", "", "tests/graph/test_graph_holding.py -k without_work"),
    Mend("little starts at once without room", "graph/admission.py", "left = min(bounds.step_blocks, max(1, bounds.pool_blocks // _TOGETHER))", "left = bounds.step_blocks", "tests/graph/test_graph_holding.py -k 64th"),
    Mend("each arrival counts", "graph/admission.py", "        self.saturation.note_arrival(queued=self._met)\n", "            self.saturation.note_arrival(queued=self._met)\n", "tests/graph/test_graph_holding.py -k long_step"),
    Mend("who fits in no room waits", "graph/admission.py", "return self._room.remaining(advice) >= min(asks.blocks, enough)", "return self._room.remaining(advice) > 0", "tests/graph/test_graph_holding.py -k fits"),
    Mend("all that a step may take are asked", "hooks/vllm/holding/holding.py", "for request in self.queue.next_requests(_MOST_LOOKED_AT):", "for request in self.queue.next_requests(1):", "tests/hooks/vllm/holding/test_hooks_holding.py -k asked_about_at_once"),
    Mend("a queue's lost contexts count", "advisor/admission.py", "return self._again + again > _CLOSES * max(self._asked + queued, self.pool)", "return self.regret > _CLOSES", "tests/advisor/test_admission.py -k long_queue"),
    Mend("starts without room rest by what they cost", "graph/admission.py", "rest = _REST + _WASTE * max(0.0, wasted - _CALM)", "rest = _REST", "tests/graph/test_graph_holding.py"),
    Mend("a short request brings in no long one", "hooks/vllm/holding/arrivals.py", "return 2 * (2 * self.at + 1) >= len(hashes) and self.is_in(hashes)", "return self.is_in(hashes)", "tests/hooks/vllm/holding/test_hooks_holding.py -k brings_in_no_long"),
    Mend("only a consumer fetches prompts", "hooks/vllm/holding/arrivals.py", "return self._fetches and bool(params.get(\"do_remote_prefill\"))", "return bool(params.get(\"do_remote_prefill\"))", "tests/hooks/vllm/holding/test_hooks_holding.py"),
    Mend("an engine falls idle after an error", "hooks/vllm/tiers/bridge.py", "has_pending_push_work=[lambda: self.owes]", "has_pending_push_work=[lambda: True]", _FAULTS),
    # What stock vLLM does stays what it does
    Mend("only what is followed is told", "hooks/vllm/patches.py", "for name in FOLLOWED if hasattr(base, name)}", "for name in dir(base) if name[0] != \"_\" and callable(getattr(base, name))}", "tests/hooks/vllm/test_hooks_beside.py -k stages"),
    Mend("vLLM's methods get whatever they are given", "hooks/vllm/tap.py", "        def cache_full_blocks(*args: Any, **kwargs: Any) -> Any:\n", "        def cache_full_blocks(*args: Any) -> Any:\n            kwargs: Any = {}\n", "tests/hooks/vllm/test_hooks_tap.py -k another_vllm"),
    Mend("a load in flight stops no reset", "hooks/vllm/tap.py", "            lent = self._lent()\n", "            lent = []\n", "tests/engine/test_engine_resets.py -k waits_for_a_load"),
    Mend("a cache's connector fetches no prompts", "hooks/vllm/scheduler.py", "if name in _FETCHERS else (\"kv_consumer\",)", "if name else ()", "tests/hooks/vllm/holding/test_hooks_holding.py -k fetched"),
    Mend("others' hints count as far as ours", "hooks/vllm/observer.py", "            translate_hints(request),\n", "", "tests/hooks/vllm/test_hooks_tagging.py -k engine_hears"),
    Mend("a priority that no float holds", "hooks/requests/hints.py", "isinstance(priority, int | float) and 0 <= priority <= _FULL", "isinstance(priority, int | float) and priority <= _FULL", "tests/hooks/vllm/test_hooks_tagging.py -k is_none"),
    Mend("made-up weights have no name", "hooks/vllm/tiers/worker.py", "if load.load_format not in _FROM_FILES:", "if False:", "tests/tiers/test_tiers_worker.py -k outlive"),
    Mend("a field that vLLM gets counts", "hooks/vllm/tiers/worker.py", "for name in sorted({each.name for each in fields(value)} - left_out):", "for name in sorted({each.name for each in fields(value) if each.name in vars(type(value))} - left_out):", "tests/tiers/test_tiers_worker.py -k at_once"),
    Mend("variables that choose the numbers", "hooks/vllm/tiers/worker.py", "        _environment(),\n", "", "tests/tiers/test_tiers_worker.py -k choose"),
    Mend("another class computes the model", "hooks/vllm/tiers/worker.py", "        _implementation(config.model_config),\n", "", "tests/tiers/test_tiers_worker.py -k plugins"),
    # The sidecar before engines that lie
    Mend("no more blocks than a pool has", "advisor/sockets/subscriber.py", "        if listed <= most:\n", "        if True:\n", f"{_SUBSCRIBER} -k more_blocks"),
    Mend("no line of the log is forged", "advisor/sockets/subscriber.py", "\"engine %r connected (%r)\"", "\"engine %s connected (%s)\"", f"{_SUBSCRIBER} -k forged"),
    Mend("strangers are forgotten again", "advisor/sockets/subscriber.py", "TTLCache(_UNKNOWN,", "TTLCache(1 << 30,", f"{_SUBSCRIBER} -k strangers"),
    Mend("a flood of garbage is one line", "advisor/sockets/subscriber.py", "self._log.warn(\"wire\", \"a message was refused: %s\", error)", "logging.getLogger(__name__).warning(\"a message was refused: %s\", error)", f"{_SUBSCRIBER} -k flood"),
    Mend("segments cost what a prompt may", "graph/ingest/segments.py", "        if covered <= room:\n", "        if True:\n", "tests/graph/test_graph_core.py -k segments"),
    Mend("many segments do not hold the graph", "graph/ingest/segments.py", "            if place % _GROUPS == 0:\n", "            if False:\n", "tests/graph/test_graph_core.py -k in_slices"),
    Mend("protected blocks are guarded while a ranking names no more", "hooks/vllm/free_queue/arranger.py", "        return not self._protection or self._window.still_suffices()\n", "        return True\n", "tests/hooks/vllm/core/test_core_engine.py -k names_no_more"),
    Mend("whoever shares a prompt pays for what its tenant may not keep", "graph/ranking/rules.py", "        costs = _costs(heads, places[granted])\n", "        costs = costs[within]\n", "tests/graph/ranking/test_graph_protection.py -k shares_a_prompt"),
    Mend("a lease is ranked before there is any session", "graph/ranking/rules.py", "tenants = of_session(sessions.tenant[: sessions.size], raised_by)", "tenants = sessions.tenant[raised_by]", "tests/graph/ranking/test_graph_protection.py -k first_session"),
    Mend("victims that the next ranking protects leave the head", "hooks/vllm/free_queue/arranger.py", "            if kept:  # of the last", "            if False:  # of the last", "tests/hooks/vllm/free_queue -k next_ranking_protects"),
    Mend("a prefetch takes no protected block", "hooks/vllm/scheduler.py", "            spare = self.arranger.spare(min(spare, fetched), fetched)\n", "            pass\n", "tests/tiers/test_tiers_loading.py -k leaves_a_step"),
    Mend("what is freed behind many blank blocks goes before what is protected", "hooks/vllm/free_queue/protection.py", "            self.forget_head(and_who_is_free=True)\n        elif others:\n", "            pass\n        elif others:\n", "tests/hooks/vllm/free_queue -k many_blank"),
    Mend("what newer words displace goes before what is protected", "hooks/vllm/free_queue/arranger.py", "            self._guard.forget_head()  # others", "            pass  # others", "tests/hooks/vllm/test_hooks_protecting.py -k lapses"),
    Mend("what a smaller share displaces goes before what is protected", "hooks/vllm/free_queue/protection.py", "return news or self.stated_count != stated", "return news", "tests/hooks/vllm/test_hooks_protecting.py -k lapses"),
    Mend("what is protected as its request ends is guarded at once", "hooks/vllm/free_queue/arranger.py", "        if self._is_disturbed:  # as by", "        if False:  # as by", "tests/hooks/vllm/test_hooks_protecting.py -k counts_again"),
    Mend("a thousand segments state a block once", "hooks/vllm/observer.py", "    return list(map(key_of, compress(hashes, covered)))\n", "    return [key_of(each) for s in segments if s.layer in PROTECTED_LAYERS for each in hashes[s.start // size : -(-s.end // size)]]\n", "tests/hooks/vllm/test_hooks_protecting.py -k stated_once"),
    Mend("a ranking names the most precious of what is protected", "graph/ranking/order.py", "    protected = runs[beyond:], offsets[beyond:]\n", "    protected = runs[:limit], offsets[:limit]\n", "tests/graph/ranking/test_graph_protection.py -k cannot_name_all"),
    Mend("what is kept is paid for in blocks, also of runs", "graph/ranking/rules.py", "first.astype(np.int64), picked.blocks_of_each, minlength", "first.astype(np.int64), minlength", "tests/graph/ranking/test_graph_places.py -k runs_are_ranked"),
    Mend("a run ends where copies do", "graph/tables/front.py", "            begins[1:] |= copies[1:] != copies[:-1]\n", "", "tests/graph/ranking -k runs_are_ranked"),
    Mend("leases go to the most precious", "graph/ingest/segments.py", "in reversed(segments) if each.pinned_s", "in segments if each.pinned_s", "tests/graph/test_graph_core.py -k leases"),
    Mend("nothing comes back behind a hole", "graph/ranking/copies.py", "(blocks.parent[top] == NO_ROW) & (blocks.depth[top] == 0)", "blocks.parent[top] == NO_ROW", "tests/graph/ranking/test_graph_prefetch.py -k forgotten"),
    # Route
    Mend("a path leads where it says", "advisor/fleet/callers.py", "        if {\".\", \"..\"} & set(path.replace(\"\\\\\", \"/\").split(\"/\")):\n", "        if {\".\", \"..\"} & set(path.split(\"/\")):\n", "tests/fleet/route/test_route_paths.py"),
    Mend("what goes out is looked at again", "advisor/fleet/upstream.py", "        check_path(call.path)\n", "", "tests/fleet/route/test_route_paths.py"),
    Mend("one caller's cookie is no other's", "advisor/fleet/upstream.py", "cookie_jar=aiohttp.DummyCookieJar(),", "cookie_jar=aiohttp.CookieJar(unsafe=True),", f"{_HOSTILE} -k cookie"),
    Mend("sessions are their callers' own", "advisor/fleet/callers.py", "parts = [*keys_of(headers), *said]", "parts = [*said]", "tests/fleet/test_session_names.py -k other_keys"),
    Mend("tools that a server runs run once", "advisor/fleet/callers.py", "if not isinstance(tools, list) or not all(map(_is_clients, tools)):", "if False:", _RETRIES),
    Mend("a prompt that a server keeps may have tools", "advisor/fleet/callers.py", "    if path == _STORES and fields.get(\"prompt\") is not None:", "    if False:", _RETRIES),
    Mend("a response that is kept is asked for once", "advisor/fleet/callers.py", "return SideEffect.KEEPS if keeps else SideEffect.NONE", "return SideEffect.NONE", _RETRIES),
    Mend("a body that is not read may do anything", "advisor/fleet/callers.py", "if fields is None or any(", "if fields is not None and any(", _RETRIES),
    Mend("names of models are logged escaped", "advisor/fleet/engines.py", "return ascii(text[:_LONGEST_LINE])[1:-1][:_LONGEST_LINE]", "return text[:_LONGEST_LINE]", f"{_HOSTILE} -k forges"),
    Mend("a hash algorithm is logged escaped", "advisor/fleet/engines.py", "number, hashing = upstream.number, _one_line(hashing)", "number = upstream.number", f"{_HOSTILE} -k algorithm"),
    Mend("metrics that break the parser", "advisor/fleet/engines.py", "    except Exception:  # the parser raises other errors too, such as IndexError\n", "    except (ValueError, KeyError, OverflowError):\n", "tests/fleet/route/test_route_pools.py -k as_large"),
    Mend("a model's name may be nested", "advisor/fleet/engines.py", "TypeError, AttributeError, RecursionError\n", "TypeError, AttributeError\n", f"{_HOSTILE} -k nested_deep"),
    Mend("no answer is quoted in the log", "advisor/fleet/upstream.py", "    if isinstance(error, aiohttp.ClientResponseError | aiohttp.ClientPayloadError):\n", "    if isinstance(error, aiohttp.ClientError):\n        return f\"{name} {error}\"\n    if False:\n", f"{_HOSTILE} -k in_no_log"),
    Mend("an answer ends with a status that servers send", "advisor/fleet/upstream.py", "        if response.status not in _STATUSES:  # 101 among them: no upgrade is passed on\n", "        if False:\n", f"{_HOSTILE} -k ends_no_answer"),
    Mend("long names of sessions are not kept", "advisor/fleet/callers.py", "    if len(name) > _LONGEST_KEPT:  # names are remembered, and one may be as long as a body\n", "    if False:\n", "tests/fleet/test_session_names.py -k as_long"),
    Mend("a block size need not be stated", "advisor/fleet/engines.py", "    except (ValueError, KeyError):\n        return \"\"", "    except ZeroDivisionError:\n        return \"\"", "tests/fleet/route/test_route_pools.py -k states_no_block"),
    Mend("room for bodies is bounded", "advisor/fleet/relay.py", "        if room.taken + more > room.most * (_FOR_LARGE if large else 1):\n", "        if False:\n", "tests/fleet/route/test_route_service.py -k bodies"),
    Mend("large bodies leave room for others", "advisor/fleet/relay.py", "room.most * (_FOR_LARGE if large else 1)", "room.most", "tests/fleet/route/test_route_service.py -k bodies"),
    # Admission
    Mend("sessions that return hold up their own tenant's alone", "graph/release_order.py", "return held.priority, self._start(place), not held.returning, place.number, id(lane), lane", "return held.priority, not held.returning, self._start(place), place.number, id(lane), lane", "tests/graph/test_graph_holding.py -k return_hold_up"),
    Mend("new names are one tenant", "graph/release_order.py", "return tenant is not None and tenant not in self._ends and tenant not in self._once", "return False", "tests/hooks/vllm/holding/test_hooks_holding.py -k new_salt"),
    Mend("a priority that vLLM does not go by", "hooks/vllm/holding/queue.py", "return request.priority if self._goes_by_priority else 0", "return request.priority", "tests/hooks/vllm/holding/test_hooks_holding_orders.py -k claims"),
    Mend("a long answer's text is joined once", "advisor/memory/engine.py", "self._parts.setdefault(field, []).append(text)", "self._parts[field] = [\"\".join([*self._parts.get(field, []), text])]", "tests/memory/test_memory_protocol.py -k long_answer"),
    # What watches something
    Mend("what drops requests and is well stays up", "advisor/fleet/engines.py", "        if wrong:\n            self.dropped(upstream, f\"{why}; {wrong}\")\n", "        if True:\n            self.dropped(upstream, f\"{why}; {wrong}\")\n", f"{_ROUTE}/test_route_poison.py -k 'every_engine or breaks'"),
    Mend("what is dropped twice is sent no further", "advisor/fleet/proxy.py", "may_go_on = asked.repeatable and len(drops) < MOST_DROPS\n", "may_go_on = asked.repeatable\n", f"{_ROUTE}/test_route_poison.py -k 'every_engine or kills'"),
    Mend("a dropped request goes to another engine", "advisor/fleet/proxy.py", "avoided = refused_by.union(drop.upstream.number for drop in drops)", "avoided = refused_by", f"{_ROUTE}/test_route_poison.py -k 'every_engine or twice_while'"),
    Mend("an engine alone is asked how it is", "advisor/fleet/proxy.py", "            await asyncio.wait({drop.look for drop in drops})\n", "            pass\n", f"{_ROUTE}/test_route_poison.py -k looked_at_first"),
    Mend("what is dropped and is not well is down at once", "advisor/fleet/engines.py", "            self.dropped(upstream, f\"{why}; {wrong}\")\n", "            pass\n", f"{_ROUTE}/test_route_poison.py -k at_once"),
    Mend("what others answer is the engine's fault", "advisor/fleet/proxy.py", "                        self.health.outdone(drop.upstream, drop.at)\n", "                        pass\n", f"{_ROUTE}/test_route_poison.py -k fault"),
    Mend("who is back has paid", "advisor/fleet/engines.py", "        if not board.up[number] or dropped_at < self._up_since.get(number, dropped_at):\n", "        if not board.up[number]:\n", f"{_ROUTE}/test_route_poison.py -k is_back"),
    Mend("who lacks descriptors blames no engine for a request", "advisor/fleet/proxy.py", "                elif not error.ours:  # no", "                else:  # no", f"{_ROUTE}/test_route_crowds.py -k used_up"),
    Mend("who lacks descriptors blames no engine for its health", "advisor/fleet/engines.py", "            return None if error.ours else str(error)", "            return str(error)", f"{_ROUTE}/test_route_crowds.py -k used_up"),
    Mend("who does not listen calls nobody silent", "advisor/fleet/engines.py", "            if self._clock() - until > _LATE_S:\n", "            if False:\n", f"{_ROUTE}/test_route_crowds.py -k silent"),
    Mend("millions of values are not parsed here", "advisor/fleet/callers.py", "    if body.count(b\",\") > MOST_VALUES:\n", "    if False:\n", f"{_ROUTE}/test_route_crowds.py -k millions"),
    Mend("a first look that fails", "advisor/fleet/engines.py", "        await self._check(self.upstreams[0])\n", "        await self._health.check(self.upstreams[0])\n", f"{_HOSTILE} -k first_look"),
    Mend("a child's odd line ends no watch", "hooks/sidecar.py", "except (ValueError, RecursionError):", "except ValueError:", "tests/hooks/test_hooks_sidecar.py -k prints"),
    Mend("a start that failed is tried again", "hooks/sidecar.py", "except (FileNotFoundError, PermissionError) as error:  # nor", "except OSError as error:  # nor", "tests/hooks/test_hooks_sidecar.py -k later"),
    Mend("tenants that were served once push out no others", "graph/release_order.py", "            book: OrderedDict[Any, float] = self._once\n", "            book: OrderedDict[Any, float] = self._ends\n", "tests/graph/test_graph_holding.py -k served_once"),
    Mend("one bad note hides no other sidecar", "advisor/fleet/residency.py", "        except Exception as error:  # whatever its answer and its note say: others are polled too\n", "        except (httpx.InvalidURL, ValueError, *BAD_PAYLOAD) as error:\n", "tests/fleet/test_residency.py -k note_whose"),
    Mend("no sidecar's answer is unpacked", "advisor/fleet/residency.py", "aiohttp.ClientSession(auto_decompress=False)", "aiohttp.ClientSession()", "tests/fleet/test_residency.py -k unpacked"),
    Mend("no engine's answer is unpacked", "advisor/fleet/upstream.py", "            auto_decompress=False,\n", "", f"{_HOSTILE} -k unpacked"),
    Mend("an answer's size is bounded", "advisor/fleet/upstream.py", "        content += chunk\n        if len(content) > MOST_ANSWER:\n", "        content += chunk\n        if False:\n", f"tests/fleet/test_residency.py {_HOSTILE} -k 'unpacked or too_large'"),
    Mend("a refusal is quoted in no log", "advisor/precache/keeper.py", "words = f\"{server.url} answered {error.code}\"", "words = f\"{server.url} answered {error.code}: {said}\"", "tests/advisor/precache/test_precache.py -k in_no_log"),
    Mend("what a tokenizer says is bounded", "advisor/fleet/upstream.py", "return OwnAnswer(answer.status, await whole_answer(answer))", "return OwnAnswer(answer.status, await answer.read())", "tests/memory/test_memory_asks.py -k any_size"),
    Mend("vectors are bounded", "advisor/memory/attention.py", "await whole_answer(answer)", "await answer.read()", "tests/memory/test_memory_asks.py -k unpacked"),
    Mend("vectors are not unpacked", "advisor/memory/attention.py", "timeout=timeout, auto_decompress=False", "timeout=timeout", "tests/memory/test_memory_asks.py -k unpacked"),
    Mend("a batch's time costs no events", "graph/wire/kv_events.py", "class _ArrayOfRaw(msgspec.Struct, array_like=True):\n    ts: msgspec.Raw\n", "class _ArrayOfRaw(msgspec.Struct, array_like=True):\n    ts: float\n", "tests/graph/test_wire.py -k time"),
    Mend("what is stored and evicted at once is one run", "graph/ingest/blocks.py", "            if len(ends) > 1:\n", "            if ends := ends * (len(ends) > 1) or [*range(1, len(churn) + 1)]:\n", f"{_SLICES} -k as_soon"),
    Mend("what is evicted and stored again is applied in order", "graph/ingest/blocks.py", "            if len(ends) > 1:\n", "            if False:\n", f"{_SLICES} -k one_by_one"),
    Mend("a run's parts are slices", "graph/ingest/blocks.py", "            if number % _PARTS == 0:\n", "            if False:\n", f"{_SLICES} -k comes_and_goes"),
    Mend("a clear costs what a pool holds", "graph/ingest/ingest.py", "            if first == end:\n", "            if False:\n", f"{_SLICES} -k emptied_again"),
    Mend("tips count where runs end", "graph/ingest/slices.py", " + 8 * int(getattr(event, \"skipped\", 0))", "", f"{_SLICES} -k leaves_out_counts"),
    Mend("many embeddings are applied in slices", "graph/ingest/slices.py", "return size * _EMBEDDING if isinstance(event, BlocksEmbedded) else size", "return size", f"{_SLICES} -k many_embeddings"),
    Mend("runs without keys are slices", "graph/ingest/slices.py", "max(size // 8, _LEAST_KEYS)", "size // 8", f"{_SLICES} -k without_keys"),
    Mend("requests without keys are slices", "graph/ingest/slices.py", "least = 8 * _LEAST_KEYS if kind is TURNS else 8", "least = 8", f"{_SLICES} -k without_keys"),
    Mend("deep ends share a bound", "graph/ingest/chains.py", "            budget -= looked\n", "", f"{_SLICES} -k deep_ends"),
    Mend("a batch walks not all that wait", "advisor/sockets/kv_order.py", "        if not self._waiting and not self.life.joining:\n", "        self._waiting = {n: held for n, held in self._waiting.items() if n >= self._expected}\n        if not self._waiting and not self.life.joining:\n", f"{_KV_EVENTS} -k without_a_walk"),
    Mend("a lost beginning leaves nothing waiting", "advisor/sockets/kv_order.py", "        self._waiting = {number: held for number, held in self._waiting.items() if number > seq}\n", "", f"{_KV_EVENTS} -k beginning_that_is_lost"),
    Mend("reasons of odd events are not compared", "graph/wire/kv_events.py", "            bad.append(reason)\n", "            bad += [reason] * (reason not in bad)\n", "tests/graph/test_wire.py -k cost_each"),
    Mend("digits in a hash are bytes", "graph/wire/kv_events.py", "    if not any(isinstance(value, bytes) for value in hashes):  # numpy reads digits in them\n", "    if not isinstance(hashes[0], bytes):\n", "tests/graph/test_wire.py -k digits"),
    Mend("one whose request waits in the kernel is not silent", "dashboards/server.py", "each for each in idle if not each._unheard", "each for each in idle", "tests/dashboards/test_dashboards_app.py -k late_to_read"),
    Mend("a batch's events are bounded", "graph/wire/kv_events.py", "_Many = msgspec.Meta(max_length=MOST_EVENTS)", "_Many = msgspec.Meta(max_length=2 * MOST_EVENTS)", "tests/graph/test_wire.py -k no_events"),
    Mend("a batch's hashes are bounded", "graph/wire/kv_events.py", "            if room < 0:\n", "            if False:\n", "tests/graph/test_wire.py -k more_hashes"),
    Mend("what is watched has a time", "advisor/sockets/kv_events.py", "            yield from self._take_live(frames)\n            if self._clock() > until:\n", "            yield from self._take_live(frames)\n            if False:\n", f"{_KV_EVENTS} -k its_time"),
    Mend("watched engines share a turn", "advisor/intake.py", "            if self._clock() > until:\n                break\n", "", f"{_KV_EVENTS} -k takes_long"),
    Mend("who had no time is the next", "advisor/intake.py", "            self._sources.rotate(-1)  # who", "            # who", f"{_KV_EVENTS} -k takes_long"),
    Mend("freed arrays leave no holes", "advisor/process/process.py", "        system.mallopt(_MMAP_THRESHOLD, _LARGE)\n", "", "tests/advisor/test_cli.py -k large_arrays"),
    Mend("a speed of nothing is not shown", "advisor/tools/terminal.py", "/s\" if rate else \"\"", "/s\"", "tests/advisor/tools/test_top.py -k nothing_was_measured"),
    Mend("a share's interval begins at zero", "tests/bench/figures.py", "low = max(0.0, middle - half)", "low = middle - half", "tests/benches/test_bench_figures.py -k share_of_nothing"),
    Mend("new shadows hear requests whose blocks they lack", "advisor/shadows/runner.py", "rows = rows[view.blocks.created[rows] < before]", "pass", "tests/policies/test_policies_shadows.py -k find_of_lrus"),
    Mend("nothing new is said seldom", "advisor/planner.py", "min(_QUIET * self._interval_s, _QUIET_S)", "0.0", "tests/advisor/test_advisor_planner.py -k nothing_new"),
    Mend("news end a quiet pause", "advisor/planner.py", "        elif self._quiet_since not in (None, self._graph.changes.total):\n            self._call.set()\n", "", "tests/advisor/test_advisor_planner.py -k nothing_new"),
    Mend("freed memory is kept for small arrays", "advisor/process/process.py", "        system.mallopt(_TRIM_THRESHOLD, _KEPT)\n", "", "tests/advisor/test_cli.py -k small_arrays"),
    Mend("a sidecar asks for no huge pages", "advisor/service.py", "    tame_memory()\n", "", "tests/advisor/test_cli.py -k huge_pages"),
    Mend("a commit is of the weights' place", "hooks/vllm/tiers/worker.py", "if getattr(model, \"hf_config_path\", None) in (None, path):", "if True:", "tests/tiers/test_tiers_worker.py -k configurations_place"),
    Mend("another transformers", "hooks/vllm/tiers/worker.py", "        transformers.__version__,  #", "        #", "tests/tiers/test_tiers_worker.py -k transformers"),
    Mend("a file that a setting names", "hooks/vllm/tiers/worker.py", "    if isinstance(value, str) and os.path.isfile(value):\n", "    if False:\n", "tests/tiers/test_tiers_worker.py -k setting_names"),
    Mend("a file that an override names", "hooks/vllm/tiers/worker.py", "[_described(each) for each in overrides.values() if isinstance(each, str)]", "[]", "tests/tiers/test_tiers_worker.py -k setting_names"),
    Mend("variables of libraries", "hooks/vllm/tiers/worker.py", "    names += _OF_LIBRARIES\n", "", "tests/tiers/test_tiers_worker.py -k choose"),
    Mend("a device's generation", "hooks/vllm/tiers/worker.py", "        _device(),\n", "", "tests/tiers/test_tiers_worker.py -k generation"),
    Mend("a pipe is no configuration", "advisor/config/edits.py", "                check_regular(self._path)\n", "                pass\n", "tests/advisor/test_config.py -k pipe"),
    Mend("a pipe is no secret", "hooks/requests/hints.py", "        if path.exists() and not path.is_file():  # the", "        if False:  # the", "tests/hooks/vllm/test_hooks_tagging.py -k pipe"),
    # What a token, a line or a byte may do
    Mend("no token follows a redirect", "graph/wire/opener.py", "handlers = _NoRedirects(), ", "handlers = urllib.request.HTTPRedirectHandler(), ", "tests/advisor/tools/test_redirects.py"),
    Mend("a child's lines are bounded", "hooks/sidecar.py", "for line in _lines(process.stdout):", "for line in process.stdout:", "tests/hooks/test_hooks_sidecar.py -k endless"),
    Mend("the end of a long line is no line", "hooks/sidecar.py", "if begins and (ends or len(part) < _MOST_LINE):", "if ends or len(part) < _MOST_LINE:", "tests/hooks/test_hooks_sidecar.py -k endless"),
    Mend("headers pass to the byte", "advisor/fleet/upstream.py", "            request_class=_RequestAsItCame,\n", "", f"{_ROUTE}/test_route_paths.py -k unchanged"),
    Mend("a body is no head", "advisor/fleet/upstream.py", "        if not self._written:\n", "        if True:\n", f"{_ROUTE}/test_route_paths.py -k piece"),
    Mend("an engine's name of a session is of its bytes", "advisor/fleet/callers.py", "name.engine_name and first.decode(\"latin-1\")", "name.engine_name", f"{_NAMES} -k by_the_bytes"),
    Mend("a subagent is no turn of its parent", "advisor/fleet/callers.py", "            own = _name(f\"{each}:{agent}\") if agent else name\n", "            own = name\n", f"{_NAMES} -k subagent"),
    Mend("a thread's name comes before its session's", "advisor/fleet/callers.py", "    \"Codex\": (\"thread-id\", \"thread_id\", \"session-id\", \"session_id\", \"conversation_id\"),\n", "    \"Codex\": (\"session-id\", \"session_id\", \"conversation_id\", \"thread-id\", \"thread_id\"),\n", f"{_NAMES} -k subagent"),
    Mend("a template that nobody filled in is no name", "advisor/fleet/callers.py", "|0{8}-[-0]{27}|\\[object .*|(\\{\\{|\\$\\{).*\"", "\"", f"{_NAMES} -k without_a_name"),
    Mend("a new key under a UUID is no new caller", "advisor/fleet/callers.py", "            owner = _scope([], fields) if by_name else scope\n", "            owner = scope\n", f"{_NAMES} -k uuid"),
    Mend("a UUID opens no chat's text", "advisor/fleet/callers.py", "by_name = self._harnesses and _UUID", "by_name = _UUID", f"{_NAMES} -k uuid"),
    Mend("Dynamo says that a session ends", "advisor/fleet/callers.py", " or (self._harnesses and _is_last(fields, headers))", "", f"{_NAMES} -k 'dynamos or continuums'"),
    Mend("a byte order mark is no JSON", "advisor/fleet/callers.py", "        if body.startswith(_MARK):\n", "        if False:\n", f"{_NAMES} -k mark"),
    Mend("what only reads is asked for again", "advisor/fleet/callers.py", "\"/v1/rerank\", \"/v1/messages/count_tokens\",\n", "\n", f"{_RETRIES}"),
    Mend("a screenshot is no text", "advisor/fleet/prompts.py", "    if isinstance(kind, str) and kind.endswith(\"_call_output\"):\n", "    if kind in (\"function_call_output\", \"custom_tool_call_output\"):\n", "tests/fleet/test_prompt_chains.py -k picture_counts"),
    Mend("a client that does not read is cut", "advisor/process/process.py", "        elif checks > 0:\n", "        elif True:\n", "tests/memory/test_memory_hostile.py -k stops"),
    # What was reported of engines, routers and callers, each kind once more
    Mend("no tiers where an id may come twice", "hooks/vllm/shapes.py", "    if envs.VLLM_DISABLE_REQUEST_ID_RANDOMIZATION:", "    if False:", f"{_SHAPES} -k as_clients_give"),
    Mend("no prefetch that KV events cannot tell", "hooks/vllm/tiers/store.py", "    if settings.prefetch and getattr(pool, \"enable_kv_cache_events\", False):", "    if False:", "tests/tiers/ahead/test_tiers_waking.py -k kv_events"),
    Mend("who prefetches nothing is not woken for it", "hooks/vllm/scheduler.py", "            if bridge.prefetches:\n", "            if True:\n", "tests/tiers/ahead/test_tiers_waking.py -k kv_events"),
    Mend("an engine that a connector changes is left stock", "hooks/vllm/shapes.py", "return _reason_without_connector(config) if user is None else None", "return None", f"{_SHAPES} -k without_any_connector"),
    Mend("what a vLLM asks of connectors is looked for", "hooks/vllm/relied_on.py", "return sorted(set(_places(package)) - KNOWN)", "return []", "tests/hooks/test_hooks_reliance.py -k asks_for"),
    Mend("a round that fails ends no watch", "advisor/fleet/residency.py", "            except Exception:\n                if not self.failed:", "            except ZeroDivisionError:\n                if not self.failed:", "tests/fleet/test_residency.py -k round"),
    Mend("a note that is no UTF-8 hides no other", "graph/wire/endpoints.py", "        except (OSError, *BAD_PAYLOAD):\n            continue", "        except (OSError, msgspec.DecodeError):\n            continue", "tests/fleet/test_residency.py -k hides_no_other"),
    Mend("prompts are looked up under a lock", "advisor/fleet/prompts.py", "        self._lock = threading.Lock()\n        self._sessions:", "        self._lock = __import__(\"contextlib\").nullcontext()\n        self._sessions:", f"{_NAMES} -k threads"),
    Mend("a store of another user", "hooks/store/stores.py", "if problem := strangers_problem(there):", "if problem := None:", f"{_STORE} -k another_user_is"),
    Mend("a start goes on whatever is in a snapshot", "graph/snapshot.py", "    except Exception as error:\n        why", "    except (ValueError, KeyError) as error:\n        why", f"{_SNAPSHOT} -k right_digest"),
    Mend("a layer's session is one", "graph/tables/integrity.py", "    assert (blocks.raised_by[live] < sessions.size).all(), \"a layer's session is none\"\n", "", f"{_SNAPSHOT} -k right_digest"),
    Mend("a session's tool is one", "graph/tables/integrity.py", "    assert (sessions.tool[: sessions.size] < len(sessions.tools)).all(), \"a session's tool is none\"\n", "", f"{_SNAPSHOT} -k right_digest"),
    Mend("a snapshot is never larger than its file", "graph/snapshot.py", "if any(part.compress_type != zipfile.ZIP_STORED for part in parts):", "if False:", f"{_SNAPSHOT} -k larger"),
    Mend("one sidecar at a time looks who is there", "advisor/sockets/front.py", "        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)\n", "", "tests/advisor/sockets/test_advisor_keys.py -k one_moment"),
    Mend("methods of APIs alone are passed on", "advisor/process/process.py", "if scope[\"method\"] not in METHODS:", "if False:", f"{_ROUTE}/test_route_service.py -k other_methods"),
    Mend("an engine that was shut down leaves no pool", "hooks/vllm/index.py", "        self._freed_at = np.full(len(pool.blocks), -math.inf)  # seconds, by block id\n", "        self._freed_at = np.full(len(pool.blocks), -math.inf)\n        self._blocks = np.array(pool.blocks, dtype=object)\n", "tests/hooks/vllm/test_hooks_connector.py -k no_pool_behind"),
    Mend("one event costs no batch", "graph/wire/kv_events.py", "            if reason.startswith(_UNKNOWN):", "            if not reason.startswith(_UNKNOWN):\n                raise WireError(reason) from None\n            if reason:", _WIRE),
    Mend("a copy is of what is known", "graph/wire/kv_events.py", "        if tier is not Tier.HOT:  # a copy is", "        if False:  # a copy is", f"{_WIRE} -k copy"),
    Mend("residency is one group's", "graph/wire/kv_events.py", "return group is None or self._group is None or group == self._group[1]", "return True", f"{_WIRE} -k group"),
    Mend("a billing line is no text", "advisor/fleet/prompts.py", "part.partition(\"\\n\")[2] if part.lstrip().startswith(_BILLING) else part for part in parts", "part for part in parts", "tests/fleet/test_prompt_chains.py -k billing"),
    Mend("cache marks are no text", "advisor/fleet/prompts.py", "    {\"cache_control\", \"id\",", "    {\"id\",", "tests/fleet/test_prompt_chains.py -k marks"),
    Mend("what keeps more than half goes on", "advisor/fleet/prompts.py", "            yield session, len(newest & words) / len(newest)", "            yield session, 0.0", f"{_NAMES} -k conversation"),
    Mend("harnesses name their sessions", "advisor/fleet/callers.py", "            found = _harness(fields, headers)", "            found = None", f"{_NAMES} -k harnesses"),
    Mend("a pool is as large as is stated", "advisor/fleet/engines.py", "float(rank.get(_STATED, \"\"))", "float(rank.get(\"\", \"\"))", f"{_ROUTE}/test_route_pools.py -k as_large"),
    Mend("a replay without the topic", "advisor/sockets/kv_events.py", "if len(frames) not in (3, 4):", "if len(frames) != 4:", f"{_KV_EVENTS} -k without_the_topic"),
    Mend("an unreadable batch is no gap", "advisor/sockets/kv_events.py", "            if self._order.wants(seq := parse_seq(frames[-2])):", "            if self._order.wants(seq := parse_seq(frames[-2])) and False:", f"{_KV_EVENTS} -k is_no_gap"),
    Mend("a refused message shows in the state", "advisor/sockets/kv_events.py", "        self._log.warn(\"refused\", \"a KV-event message of %s was left out: %s\", self.engine, why)\n        self._order.left_out()\n", "        self._log.warn(\"refused\", \"a KV-event message of %s was left out: %s\", self.engine, why)\n", f"{_KV_EVENTS} -k no_good_state"),
    Mend("a copy need not say its size", "graph/wire/kv_events.py", "    block_size: int | None = None  # of", "    block_size: int = 0  # of", f"{_WIRE} -k need_not_say"),
    Mend("Dynamo's media", "graph/wire/kv_events.py", "(\"EXTERNAL\", \"NETWORK\", \"REMOTE\", \"SHARED\")", "()", f"{_WIRE} -k any_case"),
    Mend("media of vLLM's and llm-d's stores", "graph/wire/kv_events.py", "(\"OBJ\", \"OBJECT_STORE\", \"SHARED_STORAGE\")", "()", f"{_WIRE} -k any_case"),
    Mend("remote storage is no disk of the engine's", "graph/wire/kv_events.py", "return Tier.POOL if is_remote else tier", "return tier", f"{_WIRE} -k shared_store"),
    Mend("a pool may have an unknown name", "graph/wire/kv_events.py", "(tier is None and not self._is_pool_known)", "False", f"{_KV_EVENTS} -k not_known"),
    Mend("strict servers refuse with other statuses too", "advisor/memory/engine.py", "frozenset({400, 403, 422})", "frozenset({400})", "tests/memory/test_memory_forms.py -k statuses"),
    Mend("a server that fails on a field gets none", "advisor/memory/engine.py", "(reply.status in _FAILED and call.repeatable)", "False", "tests/memory/test_memory_forms.py -k statuses"),
    Mend("what a server may have done is not sent again", "advisor/memory/engine.py", "reply.status in _FAILED and call.repeatable", "reply.status in _FAILED", "tests/memory/test_memory_forms.py -k sent_once"),
    Mend("rules behind a question are not the question", "advisor/memory/chooser.py", "in reversed(new) if block.source != \"system\"), \"\")", "in reversed(new)), \"\")", "tests/memory/test_memory_chats.py -k reminder"),
    Mend("a reminder behind a question is not all that is said", "advisor/memory/chooser.py", "_MOST_SAID: Final = 3", "_MOST_SAID: Final = 1", "tests/memory/test_memory_chats.py -k reminder"),
    Mend("a topic is one publisher's", "advisor/sockets/kv_events.py", "if not self._topic and life.topic not in (None, frames[0]):", "if False:", f"{_KV_EVENTS} -k topics_are"),
    Mend("a topic is compared whole", "advisor/sockets/kv_events.py", "if self._topic and frames[0] != self._topic:", "if False:", f"{_KV_EVENTS} -k another_topic"),
    Mend("signed hashes", "graph/wire/kv_events.py", "    if not -(1 << 63) <= key < 1 << 64:", "    if not 0 <= key < 1 << 64:", f"{_WIRE} -k signed"),
    Mend("a ranking has a number that can be reported", "graph/wire/advice.py", "    epoch: Total  # what an engine reports back", "    epoch: int", f"{_WIRE} -k could_report"),
    Mend("media in any case", "graph/wire/kv_events.py", "_MEDIA.get(medium.upper())", "_MEDIA.get(medium)", f"{_WIRE} -k any_case"),
    Mend("a block stays until its last copy is gone", "graph/wire/kv_events.py", "left = self._copies.get(key, 1) - 1", "left = 0", f"{_WIRE} -k last_copy"),
    Mend("an answer shows that a chat goes on", "advisor/fleet/prompts.py", "            if behind.by_model and behind.digest not in self._owners:", "            if False:", f"{_NAMES} -k 'behind or begun'"),
    Mend("a conversation goes on while its files change", "advisor/fleet/prompts.py", "            keeps = tokens > _KEPT * known.tokens or by_number\n", "            keeps = tokens > _KEPT * known.tokens\n", f"{_NAMES} -k most_of_its_text"),
    Mend("what stands behind a question may go", "advisor/fleet/prompts.py", "*([prompt.head] if prompt.head else ())", "*()", f"{_NAMES} -k most_of_its_text"),
    Mend("what is said again and again counts once", "advisor/fleet/prompts.py", "            kept[session] += once * each.tokens\n", "            kept[session] += each.tokens\n", f"{_NAMES} -k in_their_middle"),
    Mend("what harnesses say joins no conversations", "advisor/fleet/prompts.py", "session in replied and messages[session] + shared >= _KEPT * len(said)", "session in replied", f"{_NAMES} -k in_their_middle"),
    Mend("examples that are alike are no answers", "advisor/fleet/prompts.py", "            if behind.by_model and behind.digest not in self._owners:", "            if behind.by_model:", f"{_NAMES} -k begin_alike"),
    Mend("a signature is no picture", "advisor/fleet/prompts.py", "_ADDRESS.sub(_unsigned, _plain(_without_marks(part)))", "_plain(_without_marks(part))", f"{_NAMES} -k picture"),
    Mend("a WebSocket is refused in words", "advisor/fleet/relay.py", "            return await refusal(501, _NO_SOCKETS)(scope, receive, send)\n", "            pass\n", f"{_ROUTE}/test_route_paths.py -k socket"),
    Mend("no name of a session is refused", "advisor/fleet/callers.py", "    if not isinstance(name, str) or not name or _NOBODY.fullmatch(name):\n        return None\n", "    if not isinstance(name, str) or not name or _NOBODY.fullmatch(name):\n        return None\n    if len(name) > MOST_NAME or _NOT_IN_NAMES & set(name):\n        raise BadRequestError(name)\n", f"{_NAMES} -k not_refused"),
    Mend("undefined is no name", "advisor/fleet/callers.py", " or _NOBODY.fullmatch(name)", "", f"{_NAMES} -k without_a_name"),
    Mend("engines are sent no field of ours", "advisor/fleet/callers.py", "call = call._replace(headers=[*others, (_SESSION, turn.engine_name.encode())])", "call = call._replace(body=Body(body.rstrip()[:-1] + b',\"session_id\":\"' + turn.engine_name.encode() + b'\"}'))", f"{_NAMES} {_ROUTE}/test_route_proxy.py -k 'harnesses or nothing_of_ours'"),
    Mend("a refused name of a host is in the log", "dashboards/server.py", "            self._name(\"Host\", ", "            str.format(\"Host\", ", f"{_ROUTE}/test_route_service.py -k in_the_log_once"),
    Mend("probes hear first that it ends", "advisor/process/process.py", "if is_probe and self.leaving:", "if False:", f"{_ROUTE}/test_route_service.py -k probes"),
    Mend("one underscore behind a section is refused", "advisor/config/config.py", "            if f\"{start}_{key}\" in os.environ:\n", "            if False:\n", "tests/advisor/test_config.py -k wrong_variable"),
    Mend("a service of Kubernetes is no setting", "advisor/config/config.py", "        if f\"{start}_SERVICE_HOST\" in os.environ:\n", "        if False:\n", "tests/advisor/test_config.py -k service_of_kubernetes"),
    Mend("a byte order mark before TOML", "advisor/config/config.py", "tomllib.loads(text.removeprefix(\"\\ufeff\"))", "tomllib.loads(text)", "tests/advisor/test_config.py -k byte_order_mark"),
    Mend("a byte order mark in a file whose weights the page edits", "advisor/config/edits.py", "    text = text.removeprefix(\"\\ufeff\")", "    text = text", "tests/advisor/test_config.py -k byte_order_mark"),
    Mend("a byte order mark before a list of engines", "advisor/fleet/upstream.py", "path.read_text(\"utf-8-sig\")", "path.read_text(\"utf-8\")", "tests/fleet/test_prompt_chains.py -k list_of_engines"),
    Mend("a file of prefixes names its wrong key", "advisor/precache/prefixes.py", "raise explain_errors(error, section, {origin: content}) from None", "raise ConfigError(str(error.errors()[0][\"loc\"])) from None", "tests/advisor/precache/test_precache.py -k mistake_in_the_file"),
    Mend("a missing key is said to be missing", "advisor/config/config.py", "    if detail[\"type\"] == \"missing\":\n", "    if False:\n", "tests/advisor/test_config.py -k wrong_file"),
    Mend("what is allowed is said in plain words", "advisor/config/config.py", "    told = re.sub(r\"a valid dictionary.*\", \"a table\", told)\n", "", "tests/advisor/test_config.py -k wrong_file"),
    Mend("a server that is no sidecar is named", "advisor/tools/remote.py", "    if detail == responses.get(error.code):", "    if False:", "tests/advisor/tools/test_redirects.py -k without_such_a_path"),
    Mend("the page's address is no sidecar's", "advisor/tools/remote.py", "        named = named and not parts.query and not parts.fragment", "        named = named", "tests/advisor/test_cli.py -k wrong_input"),
    Mend("a socket's path is UTF-8", "graph/wire/endpoints.py", "    if not _is_utf8(path):", "    if False:", "tests/advisor/test_config.py -k not_utf8_is_refused"),
    Mend("a runtime directory's path is UTF-8", "graph/wire/endpoints.py", "    if not _is_utf8(base):", "    if False:", "tests/advisor/test_config.py -k not_utf8_is_refused"),
    Mend("a variable that nothing reads is named", "hooks/doctor/command.py", "    yield _check(\"variables\", check_variables)\n", "", "tests/hooks/test_hooks_doctor.py -k fit_here"),
    Mend("an engine names a variable that nothing reads", "hooks/vllm/plugin.py", "    _check_variables()\n", "", "tests/hooks/vllm/test_hooks_plugin.py -k wraps_once"),
    Mend("section lines are checked", "hooks/doctor/environment.py", "        read_sections(settings.sections)\n", "        pass\n", "tests/hooks/test_hooks_doctor.py -k engines_only_warn"),
    Mend("the kernels' variable is checked", "hooks/doctor/environment.py", "        chosen()\n", "        pass\n", "tests/hooks/test_hooks_doctor.py -k cannot_be_had"),
    Mend("what the Rust frontend takes away is said", "hooks/settings.py", "return os.environ.get(RUST_FRONTEND_VARIABLE, \"\").strip().lower() in (\"\", *OFF)", "return True", "tests/hooks/test_hooks_doctor.py -k rust"),
    Mend("a cache that finds nothing is a notice", "advisor/page/attention.py", "    if told.reason is None or told.requests < _LEAST_REQUESTS:", "    if True:", "tests/dashboards/test_page_attention.py"),
    Mend("a snapshot's path names a file", "advisor/config/sections.py", "    if not named.name:  # as \"\" and \"/\"\n", "    if False:\n", "tests/advisor/test_config.py -k wrong_file"),
    Mend("a home that nobody has", "advisor/config/sections.py", "    except RuntimeError:\n", "    except OSError:\n", "tests/advisor/test_config.py -k wrong_file"),
    Mend("a list of tables is no list of texts", "advisor/config/config.py", "    if _section_at(model, path) is not None:\n", "    if False:\n", "tests/advisor/test_config.py -k wrong_file"),
    Mend("a variable of the sidecar that nothing reads", "advisor/config/config.py", "        own = name.removeprefix(ENV_PREFIX)  # a prefix that all have would make all similar\n", "        own = name\n", "tests/advisor/test_config.py -k nothing_reads"),
    Mend("Kubernetes' variables are none of ours", "advisor/config/config.py", "        if service and f\"{name[: service.start()]}_SERVICE_HOST\" in environment:\n", "        if False:\n", "tests/advisor/test_config.py -k nothing_reads"),
    Mend("a variable is not near to all that begin alike", "hooks/settings.py", "get_close_matches(own, known, n=1)", "get_close_matches(name, [PREFIX + each for each in known], n=1)", "tests/hooks/test_hooks_doctor.py -k nothing_reads"),
    Mend("a switch for ends is no list of them", "hooks/requests/ends.py", "in (*ON, *OFF):", "in OFF:", "tests/hooks/vllm/ends/test_hooks_ends.py -k switch_is_no_mark"),
    Mend("a typo shares no text", "hooks/settings.py", "frozenset({\"graph\", \"admission\",", "frozenset({\"recall_shared\", \"graph\", \"admission\",", "tests/hooks/test_hooks_doctor.py -k only_warn_of"),
    Mend("a wrong core is said in the engine's log", "hooks/vllm/core_choice.py", "    if engine_settings(\"core\").core:\n", "    if engine_settings().core:\n", "tests/hooks/vllm/core/test_core_engine.py -k wrong_core"),
    Mend("a trace takes another's place once it is whole", _READER, "        if path.exists() and not path.is_file():", "        if path.exists():", "tests/replay/test_replay_traffic.py -k once_it_is_whole"),
    Mend("another user's sidecar is not said to be absent", "hooks/access.py", "        if os.access(path, os.W_OK, effective_ids=True):\n", "        if True:\n", "tests/hooks/test_hooks_client.py -k seen_of_an_absence"),
    Mend("Ctrl-C ends the lab's cells", "advisor/replay/arms.py", "    signal.signal(signal.SIGINT, signal.SIG_DFL)  # caught,", "    # caught,", "tests/replay/test_replay_lab.py -k interrupt_ends"),
    Mend("true is no number", "advisor/config/sections.py", "    return annotation in (int, float) or any(map(_is_number, get_args(annotation)))", "    return False", "tests/advisor/test_config.py"),
    Mend("no path has a NUL", "advisor/config/sections.py", "        if isinstance(value, str) and \"\\0\" in value:\n", "        if False:\n", "tests/advisor/test_config.py"),
    Mend("what is no HTTP fills no log", "dashboards/server.py", "        logging.getLogger(\"uvicorn.error\").addFilter(ODD_REQUESTS)\n", "", f"{_PAGE} -k no_http"),
    Mend("odd requests are a line in ten seconds", "dashboards/server.py", "        if now - self._last.get(kind, float(\"-inf\")) < _LOG_EVERY_S:\n", "        if False:\n", f"{_PAGE} -k odd_requests"),
    Mend("a name in full is the same name", "dashboards/server.py", ".removesuffix(\".\").lower()", ".lower()", f"{_ROUTE}/test_route_service.py -k in_the_log_once"),
    Mend("a proxy lives without engines", "advisor/process/process.py", "        if scope[\"path\"] in LIVENESS:", "        if False:", f"{_ROUTE}/test_route_service.py -k it_lives"),
    Mend("odd requests fill no proxy's log", "advisor/process/process.py", "    uvicorns.addFilter(ODD_REQUESTS)\n", "", f"{_ROUTE}/test_route_service.py -k odd_requests"),
    Mend("silent connections leave room for others", "advisor/process/process.py", "        if len(self.connections) > most_connections():\n", "        if False:\n", f"{_ROUTE}/test_route_silence.py -k too_many"),
    Mend("who waits for an answer is not silent", "advisor/process/process.py", "return self.cycle is None or bool(self.cycle.response_complete)", "return True", f"{_ROUTE}/test_route_silence.py -k too_many"),
    Mend("the page's schema is made once", "dashboards/app.py", "describe = cache(lambda: get_openapi(title=\"kvgraph\", version=\"1\", routes=page.routes))", "describe = lambda: get_openapi(title=\"kvgraph\", version=\"1\", routes=page.routes)", "tests/dashboards/test_dashboards_api.py -k made_once"),
    # Disk and store
    Mend("an age that cannot grow is damage", "kernels/disk.py", "        entries[entries[\"age\"] > _MOST_AGE] = _NO_ENTRY\n", "", f"{_ARENA} -k reaches"),
    Mend("a key that stands twice takes one place", "kernels/disk.py", "        taken[list(self._slots.values())] = True\n", "        taken[live] = True\n", f"{_ARENA} -k twice"),
    Mend("another user's file hides no orphan", "kernels/disk.py", "with contextlib.suppress(OSError):  # another was faster, or", "with contextlib.suppress(FileNotFoundError):  #", f"{_ARENA} -k hides"),
    Mend("a link is no disk tier", "kernels/disk.py", " | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)", " | os.O_CLOEXEC, 0o600)", f"{_ARENA} -k link_in"),
    Mend("a disk tier of another user", "kernels/disk.py", "            self._refuse(self.path, os.fstat(file))\n", "", f"{_ARENA} -k another_user_owns"),
    Mend("a disk tier in another user's directory", "kernels/disk.py", "        self._refuse(self.path.parent, self.path.parent.stat())\n", "", f"{_ARENA} -k 'another_user_owns or for_everybody'"),
    Mend("chats in another user's directory", "advisor/memory/store.py", "        _check_owner(directory)\n", "", f"{_FILES} -k another_users"),
    Mend("a pipe is no orphan", "hooks/tiers/host.py", "if stat.S_ISREG(about.st_mode) and not", "if not", "tests/tiers/test_tiers_worker.py -k dates"),
    Mend("hints that cannot be read may forbid", "hooks/requests/hints.py", "    return tag is None or (isinstance(tag, dict) and tag.get(SHARE, True) is True)\n", "    return not isinstance(tag, dict) or tag.get(SHARE, True) is True\n", "tests/store/test_store_sharing.py -k forbids"),
    Mend("a pipe is no value", "hooks/store/stores.py", " | os.O_NOFOLLOW | os.O_NONBLOCK\n", " | os.O_NOFOLLOW\n", f"{_STORE} -k pipe"),
    Mend("another user's folder is no failure", "hooks/store/stores.py", "    except PermissionError:  # another user's folder\n", "    except ZeroDivisionError:\n", f"{_STORE} -k another_user_holds"),
    Mend("times ahead are the oldest", "hooks/store/stores.py", "(used_at if used_at <= ahead else 0.0, size, path)", "(used_at, size, path)", f"{_STORE} -k for_ever"),
    Mend("a value that is written is as old as the clock says", "hooks/store/stores.py", "            old = now - _LEFT_BEHIND_S\n", "            old = max([used_at for used_at, *_ in _files_in(folder)], default=now) - _LEFT_BEHIND_S\n", f"{_STORE} -k being_written"),
    Mend("what is not shared is not lost", "hooks/tiers/mover.py", "        if what == _SHARING:  #", "        if False:  #", "tests/tiers/test_tiers_mover.py -k costs_this_engine"),
    # Recordings, and what is read as one
    Mend("a request that is not told whole", "advisor/replay/recorder.py", "        if not _is_whole(started, event):  #", "        if False:  #", f"{_LAB} -k told_whole"),
    Mend("an answer is no shorter than none", "advisor/replay/recorder.py", "max(0, event.total_tokens - started.prompt_tokens)", "event.total_tokens - started.prompt_tokens", f"{_LAB} -k told_whole"),
    Mend("as many layers as an engine tells", "advisor/replay/reader.py", "msgspec.Meta(max_length=MAX_SEGMENTS)", "msgspec.Meta(max_length=1024)", f"{_LAB} -k told_whole"),
    Mend("a pipe is no trace", "advisor/replay/reader.py", "    if path.is_fifo():\n", "    if False:\n", f"{_CLI} -k pipe"),
    Mend("a pipe is no list of engines", "advisor/fleet/command.py", "            check_regular(file)\n", "", f"{_ROUTE}/test_route_service.py -k pipe"),
    Mend("nobody listens at no address", "advisor/fleet/command.py", "        at = await check_address(host, port)\n", "        at = port\n", f"{_CLI} -k 'wrong_input or taken'"),
    Mend("a chat proxy's address is checked", "advisor/memory/command.py", "    port = await check_address(host, port)\n", "", f"{_CLI} -k wrong_input"),
    Mend("nobody comes back, nothing is learned", "advisor/replay/prior.py", "    if not whole.returned.any():\n", "    if False:\n", f"{_LAB} -k never_come_back"),
    Mend("a prior's file has the name that was given", "advisor/replay/prior.py", "np.savez_compressed(file, allow_pickle", "np.savez_compressed(out, allow_pickle", f"{_LAB} -k starts_from"),
    Mend("a host that has no address", "advisor/service.py", "        if (error.errno or 0) < 0:  #", "        if False:  #", f"{_CLI} -k wrong_input"),
    Mend("a trace's place is looked at first", "advisor/replay/fleet_traffic.py", "    check_writable(\"--out\", out, replaced=True)  # many users take minutes\n", "", f"{_CLI} -k wrong_input"),
    Mend("an address has a port", "advisor/tools/remote.py", "    return named and url.isprintable() and \" \" not in url", "    return named", f"{_CLI} -k wrong_input"),
    Mend("a pipe names no prefixes", "advisor/precache/prefixes.py", "    check_regular(path)\n    text = read", "    text = read", f"{_CLI} -k pipe"),
    Mend("vectors come from an address", "advisor/memory/command.py", "    if embeddings and not embeddings.startswith", "    if False and not embeddings.startswith", f"{_CLI} -k wrong_input"),
    Mend("a rest that nobody uses is over", "graph/admission.py", "now >= self._from or now - self._worked_at >= self._enough", "now >= self._from", "tests/graph/test_graph_holding.py -k nobody_uses"),
    Mend("an engine without work rests for nobody", "graph/admission.py", "hurries=idle or oldest", "hurries=oldest", "tests/graph/test_graph_holding.py -k nobody_uses"),
    Mend("a long prompt leaves a step to others", "hooks/vllm/holding/chunks.py", "self._limit(self._fitting() if crowded and self._all_fit() else 0)", "self._limit(0)", "tests/hooks/vllm/holding/test_hooks_holding.py -k leaves_a_slow_step"),
    Mend("prompts side by side fit the pool", "hooks/vllm/holding/chunks.py", "return bool(lacking <= free * scheduler.block_size)", "return True", "tests/hooks/vllm/holding/test_hooks_holding_chunks.py -k side_by_side"),
    Mend("steps that are long anyway limit no prompt", "hooks/vllm/holding/chunks.py", "seconds = max(_CHUNK_S, step_s)", "seconds = _CHUNK_S", "tests/hooks/vllm/holding/test_hooks_holding.py -k would_not_pay"),
    Mend("an operator's limit of prompts stays", "hooks/vllm/holding/chunks.py", "if config.long_prefill_token_threshold != self._set:", "if False:", "tests/hooks/vllm/holding/test_hooks_holding.py -k operator_set"),
    Mend("a line needs steps of two lengths", "hooks/vllm/holding/chunks.py", "_middle(self._few or self._some)", "_middle(self._few)", "tests/hooks/vllm/holding/test_hooks_holding_chunks.py -k whatever_they"),
    Mend("steps that hang price no prompt", "hooks/vllm/holding/chunks.py", "cheap = more[: (len(more) + 1) // 2]", "cheap = more", "tests/hooks/vllm/holding/test_hooks_holding_chunks.py -k every_fourth"),
    Mend("a line is not believed far from its steps", "hooks/vllm/holding/chunks.py", "if not (self._set or self._times.lasted(_WORTH * _CHUNK_S)):", "if False:", "tests/hooks/vllm/holding/test_hooks_holding_chunks.py -k as_fast_as"),
    Mend("drafts are not cut", "hooks/vllm/holding/chunks.py", "1 + int(getattr(scheduler, \"num_spec_tokens\", 0)),", "0,", "tests/hooks/vllm/holding/test_hooks_holding_chunks.py -k 'leaves_what or drafts'"),
    Mend("the last part of a prompt is computed", "hooks/vllm/holding/chunks.py", "int(getattr(scheduler, \"num_prefill_lookahead\", 0)),", "0,", "tests/hooks/vllm/holding/test_hooks_holding_chunks.py -k leaves_what"),
    Mend("another's limit of prompts stays", "hooks/vllm/holding/chunks.py", "if config.long_prefill_token_threshold != self._set:", "if False:", "tests/hooks/vllm/holding/test_hooks_holding_chunks.py -k another_sets"),
    Mend("a limit that cannot be taken back holds nobody", "hooks/vllm/holding/holding.py", "self.queue.detach()  # first: an error in the other keeps nobody waiting\n        self._chunks.rest()", "self._chunks.rest()\n        self.queue.detach()", "tests/hooks/vllm/holding/test_hooks_holding_chunks.py -k cannot_be_taken"),
    Mend("prompts are limited until the crowd ends", "hooks/vllm/holding/holding.py", "            self._chunks.rest()\n            self.rests", "            self.rests", "tests/hooks/vllm/holding/test_hooks_holding.py -k leaves_a_slow_step"),
    Mend("prompts of others keep a rest up", "hooks/vllm/holding/queue.py", "any(not each.num_output_tokens for", "any(False for", "tests/hooks/vllm/holding/test_hooks_holding.py -k prompt_of_anybody"),
    Mend("a sidecar's note lasts as long as it runs", "graph/wire/endpoints.py", "            fcntl.flock(number, fcntl.LOCK_EX)\n", "", "tests/advisor/sockets/test_advisor_keys.py -k 'dead_sidecar or containers'"),
    # Engines that are told apart
    Mend("engines behind one endpoint are several", "advisor/config/sections.py", "if at[each.endpoint] == 1 else", "if True else", "tests/advisor/test_config.py -k behind_one"),
    Mend("no engine is followed twice", "advisor/config/sections.py", "if known and (each.topic in known or \"\" in {each.topic, *known}):", "if False:", "tests/advisor/test_config.py -k names_key"),
    Mend("long ids are several series", "dashboards/metrics.py", "return f\"{text[: _LENGTH - 1 - len(digest)]}~{digest}\"", "return text[:_LENGTH]", f"{_PAGE} -k begin_alike"),
    Mend("a system text before the first special token", "hooks/requests/messages.py", "run = runs[at] if at else runs[at]._replace(start=0)", "run = runs[at]", f"{_LAYERS} -k without_a_special"),
    Mend("a nested table of layers", "hooks/requests/borders.py", "        return read_table(text)\n    except (ValueError, RecursionError) as", "        return read_table(text)\n    except ValueError as", f"{_LAYERS} -k broken_table"),
    Mend("a chat that names no border is not walked", "hooks/requests/messages.py", "        if not self._may_name(messages):\n            return frozenset()\n", "", f"{_LAYERS} -k names_no_border"),
    Mend("what cannot be packed is walked", "hooks/requests/messages.py", "        except Exception:  # other than plain data is walked\n            return True", "        except Exception:\n            return False", f"{_LAYERS} -k wherever_it_is_typed"),
    Mend("nested sections", "hooks/requests/borders.py", "AttributeError, TypeError, RecursionError):", "AttributeError, TypeError):", f"{_LAYERS} -k own_sections"),
    Mend("a store's bit goes with its row", "graph/tables/blocks.py", "        self.tiers[:, rows] = 0  #", "        #", "tests/graph/test_graph_lineage.py -k only_a_store"),
    Mend("of sessions that are over, the first goes first", "advisor/policies/lifecycle.py", "claims[over] -= SCALE * np.log1p(", "claims[over] -= 0 * np.log1p(", "tests/policies/test_policies_lifecycle.py -k ended_first"),
    # What an operator reads
    Mend("under LRU every evicted block was worth a copy", "graph/ingest/blocks.py", "judged = not self._under_lru(engine)", "judged = True", "tests/graph/ranking/test_graph_spill.py -k under_lru"),
    Mend("under LRU every block is worth a copy in words", "graph/explain.py", "if against and not any(is_under_lru(each, order.policy, order.referee) for each in columns):", "if against:", "tests/graph/ranking/test_graph_spill.py -k under_lru"),
    Mend("events that never arrived are old news", "advisor/page/attention.py", "reports.applied is not None and now - reports.dropped_at <= WINDOW_S:", "reports.applied is not None and reports.applied.dropped:", "tests/dashboards/test_page_attention.py -k never_arrived"),
    Mend("a free port is known before it is logged", "advisor/process/process.py", "    return free\n", "    return port\n", "tests/fleet/route/test_route_service.py -k free_port"),
    Mend("an unknown block is named as it was asked for", "graph/explain.py", "f\"no block {block_name(key)} ({key}) is known", "f\"no block {key} is known", "tests/graph/logs/test_graph_reasons.py"),
    Mend("shares of top are of tokens", "advisor/tools/top.py", "pad_edge=False, caption=said,", "pad_edge=False, caption=None,", "tests/advisor/tools/test_top.py -k every_width"),
    Mend("who hangs up with the whole answer did not leave", "advisor/fleet/relay.py", "if whole.is_set():", "if False:", "tests/fleet/route/test_route_proxy.py -k hangs_up_once"),
    Mend("a stream's last event is its end", "advisor/fleet/upstream.py", " or chunk.rstrip().endswith(_LAST)", "", "tests/fleet/route/test_route_proxy.py -k hangs_up_once"),
    Mend("an answer that was read is whole", "advisor/fleet/upstream.py", "self.response.content.at_eof() or ", "", "tests/memory/test_memory_protocol.py -k hangs_up_once"),
    Mend("a pool is as large as what it can hold", "advisor/page/now.py", "tables.usable_blocks(column) or None", "tables.pool_blocks.get(column)", "tests/advisor/test_page_answers.py -k adds_up"),
    Mend("a replay's figures outlive a full disk", "advisor/replay/cli.py", "        if as_json:\n            typer.echo(json.dumps(table.as_dict()))\n", "        if picture is not None:\n            draw(table, picture)\n        if as_json:\n            typer.echo(json.dumps(table.as_dict()))\n", "tests/replay/test_replay_lab.py -k full_disk"),
    Mend("a plan's figures outlive a full disk", "advisor/replay/plan.py", "    best = cheapest(found, ttft)\n", "    best = cheapest(found, ttft)\n    draw_plans(found, best, ttft, picture)\n", "tests/replay/test_replay_lab.py -k full_disk"),
    Mend("a recording that was cut short is called so", "advisor/replay/cli.py", "    if recorder.failed:\n", "    if False:\n", "tests/replay/test_replay_traces.py -k cut_short"),
    Mend("a part of an export is not in the way", "advisor/tools/export.py", "            path.unlink(missing_ok=True)  #", "            pass  #", "tests/advisor/tools/test_export.py -k full_disk"),
    Mend("prompts that begin otherwise do not begin alike", "advisor/page/attention.py", "    if told.reason is Reason.DIVERGED:", "    if False:", "tests/dashboards/test_page_attention.py -k begin_otherwise"),
    Mend("the example asks for what it needs", "examples/langgraph_agent.py", "if len(sys.argv) != 3:", "if False:", "tests/test_examples.py -k asks_for"),
)
# fmt: on


def run(figures: Figures, size: Size, say: Say) -> None:
    """Take each mend out in a copy of the tree, and count those that no test misses."""
    mends = [each for each in MENDS if size.only in each.name or size.only in each.file]
    if not mends:
        names = ", ".join(each.name for each in MENDS)
        raise InputError(f"--only {size.only!r}: no mend has it in its name or file: {names}")
    survived = 0
    with tempfile.TemporaryDirectory(prefix="kvgraph-mends-") as directory:
        tree = copied_tree(Path(directory))
        say(f"the tests of {len(mends)} mends as they are")
        for tests in dict.fromkeys(each.tests for each in mends):
            if tested(tree, tests) != _PASSED:
                raise BenchError(f"these fail without any change: {tests}")
        for number, mend in enumerate(mends):
            say(f"{number} of {len(mends)}, {survived} survived: {mend.name}")
            with taken_out(tree, mend):
                ended = tested(tree, mend.tests)
            if ended not in (_PASSED, _FAILED):
                raise BenchError(f"{mend.name}: its mutant lets no test run: {mend.new!r}")
            survived += ended == _PASSED
            figures.add(f"killed: {mend.name}", ended == _FAILED, "bool", "true")
    figures.add("mends_survived", survived, f"of {len(mends)}", "0")


def copied_tree(directory: Path) -> Path:
    """A copy of the tree that can be imported from ``directory``; BenchError outside of a clone."""
    if not (ROOT / "pyproject.toml").exists():
        raise BenchError("mends are taken out of a clone's files: run it in one")
    tree = directory / "kvgraph"
    shutil.copytree(ROOT, tree, ignore=shutil.ignore_patterns(*_LEFT_OUT))
    (directory / "kvgraph_bench").symlink_to(tree / "tests" / "bench")
    return tree


@contextmanager
def taken_out(tree: Path, mend: Mend) -> Iterator[None]:
    """The tree without a mend; raises BenchError if its text does not stand in its file once."""
    path = tree / mend.file
    text = path.read_text()
    if text.count(mend.old) != 1:
        raise BenchError(f"{mend.name}: {mend.file} has its text {text.count(mend.old)} times")
    path.write_text(text.replace(mend.old, mend.new))
    try:
        yield
    finally:
        path.write_text(text)


def tested(tree: Path, tests: str) -> int:
    """What pytest says of a tree; a test that hangs, or ends pytest's process, has failed."""
    environment = os.environ | {
        "PYTHONPATH": str(tree.parent), "PYTHONDONTWRITEBYTECODE": "1",
        "PYTEST_ADDOPTS": "-x -q -p no:cacheprovider",
    }  # fmt: skip
    words: Sequence[str] = [sys.executable, "-m", "pytest", *shlex.split(tests)]
    try:
        ended = subprocess.run(
            words, cwd=tree, env=environment, timeout=_MOST_S, stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired:
        return _FAILED
    if ended.returncode < 0:  # killed by a signal
        return _FAILED
    return ended.returncode if ended.returncode in (_PASSED, _FAILED) else _OTHERWISE
