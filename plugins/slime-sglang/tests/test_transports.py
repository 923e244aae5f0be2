"""Transports without SGLang: senders deliver to a server that holds no model."""

import errno
import os
import re
import socket
import subprocess
import sys
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from sent_weights import Engine, sglang_endpoint, weights

from slime_core.contracts.setup import EngineEndpoint
from slime_core.contracts.transport import SenderSetup
from slime_core.errors import EngineError, PluginError, StorageError
from slime_sglang.server import loading
from slime_transports import folder, handles
from slime_transports.broadcast import BroadcastError, BroadcastGroup
from slime_transports.delta_code import changed as changed_in
from slime_transports.delta_code import compare, compress, decompress
from slime_transports.flattened_bucket import flat_buckets, flatten
from slime_transports.plugin import Delta, Disk, Distributed, Ipc
from slime_transports.servers import Servers

DRIVERS = [Ipc, Distributed, Disk, Delta]


# -------------------------------------------------------------------- buckets


def test_buckets_keep_every_tensor_aligned():
    layers = [{"half": torch.arange(3, dtype=torch.bfloat16), "wide": torch.arange(2.0)}, None, {"big": torch.ones(99)}]
    nothing, first, second = flat_buckets(layers, 16)
    assert nothing is None
    assert (first.names, first.ends, first.last) == (("wide", "half"), [8, 14], False)
    assert (second.names, second.data.nbytes, second.last, second.index) == (("big",), 396, True, 1)
    assert {name: tensor.tolist() for name, tensor in first.tensors()} == {"wide": [0, 1], "half": [0, 1, 2]}


def test_tensors_that_belong_together_are_in_one_bucket():
    """Tensors of a layer; those without a partner come at the end."""
    names = ["0.kv_a_proj_with_mqa.w", "0.b", "0.c", "0.q_a_proj.w", "1.kv_a_proj_with_mqa.w", "1.b", "1.c"]
    names = [f"layers.{name}" for name in names]
    found = [bucket.names for bucket in flat_buckets(({name: torch.ones(4)} for name in names), 16)]
    assert [[name.removeprefix("layers.") for name in bucket] for bucket in found] == [
        ["0.b"], ["0.c"], ["0.kv_a_proj_with_mqa.w", "0.q_a_proj.w"], ["1.b"], ["1.c"], ["1.kv_a_proj_with_mqa.w"],
    ]  # fmt: skip


@pytest.mark.parametrize("changed", [[], [0], [69], [3, 17, 18, 40], list(range(70))])
def test_a_delta_has_the_changed_elements(changed):
    """Against bytes written by hand: 10 float32, 20 bfloat16, 10 int8 elements."""
    before = np.random.default_rng(0).integers(0, 256, 90, dtype=np.uint8)
    after = before.copy()
    for place in changed:
        after[place] ^= 0xFF
    dtypes, ends = [torch.float32, torch.bfloat16, torch.int8], [40, 80, 90]
    tensors = [
        ("f", torch.from_numpy(after[:40].copy()).view(torch.float32)),
        ("h", torch.from_numpy(after[40:80].copy()).view(torch.bfloat16)),
        ("i", torch.from_numpy(after[80:].copy()).view(torch.int8)),
    ]
    held = torch.from_numpy(before.copy())
    content, parts = compress(compare(held, flatten(tensors, index=0, last=True)), level=1)
    assert held.numpy().tobytes() == after.tobytes(), "the copy follows"
    rebuilt = before.copy()
    widths = []
    for width, start, end, positions, values in changed_in(
        decompress(content, parts), dtypes, ends, torch.device("cpu")
    ):
        widths.append(width)
        rebuilt[start:end].reshape(-1, width)[positions.numpy()] = values.numpy().view(np.uint8).reshape(-1, width)
    assert widths == [4, 2, 1]
    assert rebuilt.tobytes() == after.tobytes()


class Fused(torch.nn.Module):
    """Stacks two projections, as SGLang does."""

    def __init__(self):
        super().__init__()
        self.layers = torch.nn.ModuleList([torch.nn.Module(), torch.nn.Module()])
        for layer in self.layers:
            layer.gate_up = torch.nn.Parameter(torch.zeros(8, 3, dtype=torch.bfloat16), requires_grad=False)
            layer.norm = torch.nn.Parameter(torch.zeros(3, dtype=torch.bfloat16), requires_grad=False)

    def load_weights(self, named):
        for name, tensor in named:
            _, number, part = name.split(".")
            own = self.layers[int(number)]
            target = own.norm if part == "norm" else own.gate_up[:4] if part == "gate" else own.gate_up[4:]
            target.copy_(tensor)


def fused_weights(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"gate": (4, 3), "up": (4, 3), "norm": (3,)}
    return {
        f"layers.{n}.{part}": torch.randn(shape, generator=generator).to(torch.bfloat16)
        for n in range(2)
        for part, shape in shapes.items()
    }


class Updater:
    def __init__(self, model):
        self.get_model = lambda: model


def written(root, tensors, held, base, identity):
    """A folder with a delta to `held`, as the sender writes it."""
    path = root / identity
    path.mkdir()
    bucket = flatten(list(tensors.items()), index=0, last=True)
    content, parts = compress(compare(held, bucket), level=1)
    (path / "x.zst").write_bytes(content)
    entry = folder.FileEntry(
        file="x.zst",
        names=bucket.names,
        checksum=folder.xxhash.xxh3_64_hexdigest(content),
        nbytes=len(content),
        dtypes=tuple(str(dtype).removeprefix("torch.") for dtype in bucket.dtypes),
        shapes=bucket.shapes,
        parts=tuple(parts),
    )
    manifest = folder.Manifest(version=2, identity=identity, base=base, buckets=(entry,))
    (path / folder.MANIFEST).write_text(manifest.model_dump_json())
    return path


def test_a_server_applies_a_delta_through_its_own_loader(tmp_path):
    model, old, new = Fused(), fused_weights(1), fused_weights(1)
    model.load_weights(old.items())
    model.slime_weights_identity = "one"
    new["layers.0.up"][2, 1] += 1
    new["layers.1.gate"] = new["layers.1.gate"] * 2
    new["layers.1.norm"][0] = -0.0
    held = flatten(list(old.items()), index=0, last=True).data
    path = written(tmp_path, new, held, "one", "two")
    original = Updater(model)
    assert loading.load_from_disk(None, original, str(path), "safetensors") == (True, "Applied the delta to version 2.")
    expected = Fused()
    expected.load_weights(new.items())
    for (name, got), exact in zip(model.named_parameters(), expected.parameters(), strict=True):
        assert torch.equal(got.view(torch.int16), exact.view(torch.int16)), name
    # A second time it is a delta to other weights.
    loaded, message = loading.load_from_disk(None, original, str(path), "safetensors")
    assert not loaded
    assert folder.WRONG_BASE in message
    loading.forget_base(lambda updater: None, original)
    assert model.slime_weights_identity is None


def test_a_damaged_delta_changes_nothing(tmp_path):
    model, old, new = Fused(), fused_weights(1), fused_weights(2)
    model.load_weights(old.items())
    model.slime_weights_identity = "one"
    path = written(tmp_path, new, flatten(list(old.items()), index=0, last=True).data, "one", "two")
    content = bytearray((path / "x.zst").read_bytes())
    content[9] ^= 1
    (path / "x.zst").write_bytes(content)
    before = [parameter.clone() for parameter in model.parameters()]
    loaded, message = loading.load_from_disk(None, Updater(model), str(path), "safetensors")
    assert not loaded
    assert "bucket 0 of version 2" in message
    assert "checksum" in message
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


# -------------------------------------------------------------------- senders


@pytest.mark.parametrize("driver", DRIVERS)
def test_all_engines_hold_the_same_bytes(driver, ranks, stack):
    engines = [Engine(stack, 0), Engine(stack, 1)]
    rank = ranks(driver)
    for version in (1, 2, 2, 3):
        report = rank.send(weights(version), version, *engines)
        assert report.buckets > 2
        assert all(engine.holds(weights(version)) for engine in engines)
        assert rank.exhausted
    assert engines[0].versions == [1, 2, 2, 3]


@pytest.mark.parametrize("driver", DRIVERS)
def test_an_error_names_engine_and_bucket_and_the_export_is_exhausted(driver, ranks, stack):
    good, bad = Engine(stack, 0), Engine(stack, 1)
    bad.refuse = 1
    rank = ranks(driver)
    with pytest.raises(EngineError, match=r"version 4.*engine 1.*refused for the test") as caught:
        rank.send(weights(1), 4, good, bad)
    assert driver in (Disk, Delta) or "bucket 1 of version 4" in str(caught.value)
    assert rank.exhausted
    bad.refuse = None
    rank.send(weights(2), 5, good, bad)
    assert good.holds(weights(2))
    assert bad.holds(weights(2))


@pytest.mark.parametrize("driver", DRIVERS)
def test_a_dead_engine_is_an_error_soon(driver, ranks, stack):
    engine = Engine(stack, 0)
    # No process listens on this port, and while it is bound no other process can.
    unused = stack.enter_context(socket.socket())
    unused.bind(("127.0.0.1", 0))
    dead = Engine(stack, 3)
    dead.endpoint = replace(dead.endpoint, url=f"http://127.0.0.1:{unused.getsockname()[1]}")
    rank = ranks(driver)
    with pytest.raises(EngineError, match="engine 3"):
        rank.send(weights(1), 1, engine, dead)
    assert rank.exhausted
    rank.send(weights(2), 2, engine)
    assert engine.holds(weights(2))


@pytest.mark.parametrize("driver", DRIVERS)
def test_an_engine_that_hangs_is_an_error_after_the_timeout(driver, ranks, stack):
    silent = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
    engine = Engine(stack, 2)
    engine.endpoint = replace(engine.endpoint, url=f"http://127.0.0.1:{silent.getsockname()[1]}")
    rank = ranks(driver, update_weights_timeout=1.0)
    with pytest.raises(EngineError, match=r"engine 2|has not ended"):
        rank.send(weights(1), 1, engine)


def test_an_engine_that_does_not_join_a_group_is_named():
    engines = [EngineEndpoint(index=index, url="http://127.0.0.1:1", incarnation="first") for index in (0, 2)]
    group = BroadcastGroup("early", engines, device="cpu", timeout_s=30)
    # For the engines alone: its own store may take longer.
    group._timeout = timedelta(seconds=0.05)
    with pytest.raises(BroadcastError, match=r"group early: not all of engine 0, engine 2 have joined: .*early"):
        group.join()


def test_an_engine_that_leaves_in_a_broadcast_is_an_error_of_engines(stack):
    """Gloo raises RuntimeError: a run would end, instead of running without the engine."""
    engine = Engine(stack, 2)
    group = BroadcastGroup("left", [engine.endpoint], device="cpu", timeout_s=10)
    with ThreadPoolExecutor(1) as beside:
        there = beside.submit(
            engine.partner.respond,
            "/init_weights_update_group",
            {
                "group_name": "left",
                "backend": "gloo",
                "master_address": group.address,
                "master_port": group.port,
                "rank_offset": 1,
                "world_size": 2,
            },
        )
        group.join()
        there.result()
    engine.partner.groups.clear()
    with pytest.raises(BroadcastError, match=r"not all of engine 2 have received a broadcast"):
        group.broadcast(torch.ones(1_000_000), None)


@pytest.mark.parametrize("late", [0.0, 0.1])
def test_an_engines_error_comes_before_that_of_its_group(stack, late, monkeypatch):
    """In either order: both end at the same timeout."""
    # Longer than the engine's error takes.
    monkeypatch.setattr("slime_transports.servers.EXPLAINED_S", 60.0)
    servers = Servers(5.0)
    stack.callback(servers.close)
    calls = [Future(), Future(), Future()]
    timer = threading.Timer(late, calls[2].set_exception, [EngineError("engine 2: no response in 5 s")])
    timer.start()
    stack.callback(timer.join)
    calls[0].set_exception(BroadcastError("not all have come"))
    with pytest.raises(EngineError, match="engine 2: no response"):
        servers.wait(calls)
    with pytest.raises(BroadcastError, match="not all have come"):
        servers.wait(calls[:1])


@pytest.mark.parametrize("driver", DRIVERS)
def test_no_engine_is_asked_to_flush(driver, ranks, stack):
    """With waiting requests SGLang would crash."""
    engine = Engine(stack)
    bodies = []
    respond = engine.partner.respond
    engine.partner.respond = lambda path, body: (bodies.append((path, body)), respond(path, body))[1]
    ranks(driver).send(weights(1), 1, engine)
    updates = [body for path, body in bodies if path.startswith("/update_weights")]
    assert updates
    assert all(body["flush_cache"] is False for body in updates)
    assert [body.get("weight_version") for body in updates][-1] == "1"
    assert all(body.get("weight_version") is None for body in updates[:-1])


def test_a_draft_with_its_own_folder_keeps_its_weights(ranks, stack):
    """SGLang would load the weights into both models; the model's own draft layers are in the model's folder."""
    engines = [Engine(stack, number) for number in range(4)]
    speculating = [("EAGLE3", "/draft"), ("EAGLE", "/model"), (None, None), ("STANDALONE", "/model")]
    for engine, (algorithm, draft) in zip(engines, speculating, strict=True):
        engine.partner.server_info = {
            "model_path": "/model",
            "speculative_algorithm": algorithm,
            "speculative_draft_model_path": draft,
        }
    bodies = [[] for _ in engines]
    for engine, seen in zip(engines, bodies, strict=True):
        engine.partner.respond = lambda path, body, seen=seen, respond=engine.partner.respond: (
            seen.append(body),
            respond(path, body),
        )[1]
    ranks(Ipc).send(weights(1), 1, *engines)
    assert [{body["disable_draft_model"] for body in seen} for seen in bodies] == [{True}, {False}, {False}, {True}]


def test_a_group_lives_as_long_as_its_engines(ranks, stack):
    engines = [Engine(stack, 0), Engine(stack, 1)]
    rank = ranks(Distributed)
    for version in (1, 2):
        rank.send(weights(version), version, *engines)
    assert [engine.partner.calls.count("/init_weights_update_group") for engine in engines] == [1, 1]
    # A restarted server has forgotten its groups.
    engines[1].partner.groups.clear()
    engines[1].endpoint = replace(engines[1].endpoint, incarnation="second")
    rank.send(weights(3), 3, *engines)
    assert all(engine.holds(weights(3)) for engine in engines)
    assert [len(engine.partner.groups) for engine in engines] == [1, 1]
    assert os.environ["NCCL_CUMEM_ENABLE"] == "0"


@pytest.mark.parametrize("driver", DRIVERS)
def test_frozen_tensors_are_sent_to_an_engine_once(driver, ranks, stack):
    engine = Engine(stack)
    rank = ranks(driver, frozen=["a.1.w", "head"])
    rank.send(weights(1), 1, engine)
    changed = weights(2) | {name: weights(1)[name] for name in ("a.1.w", "head")}
    engine.tensors.pop("head")
    report = rank.send(changed, 2, engine)
    assert driver is Delta or report.bytes_sent == sum(t.nbytes for t in changed.values()) - 32 - 36
    assert driver is Delta or "head" not in engine.tensors
    if driver is not Delta:
        # It has slept, and has none of its weights. A delta is only sent to engines that keep them.
        engine.tensors.clear()
        engine.endpoint = replace(engine.endpoint, dropped=1)
        rank.send(changed, 2, engine)
        assert engine.holds(changed)
    engine.endpoint = replace(engine.endpoint, incarnation="second")
    rank.send(changed, 2, engine)
    assert engine.holds(changed)
    assert rank.sender._complete == {(engine.endpoint, engine.endpoint.dropped)}
    engine.refuse = 0
    with pytest.raises(EngineError):
        rank.send(changed, 3, engine)
    engine.refuse = None
    engine.tensors.clear()
    rank.send(changed, 3, engine)
    assert engine.holds(changed), "after a failure nothing is taken for granted"


def test_a_frozen_tensor_is_sent_with_its_stacked_partner(ranks, stack):
    """SGLang would forget the one that changes."""
    engine = Engine(stack)
    named = {
        name: torch.ones(4) for name in ("a.q_a_proj.w", "a.kv_a_proj_with_mqa.w", "b.kv_a_proj_with_mqa.w", "c.w")
    }
    rank = ranks(Ipc, frozen=["a.kv_a_proj_with_mqa.w", "b.q_a_proj.w", "b.kv_a_proj_with_mqa.w", "c.w"])
    rank.send(named, 1, engine)
    engine.tensors.clear()
    rank.send(named, 2, engine)
    assert sorted(engine.tensors) == ["a.kv_a_proj_with_mqa.w", "a.q_a_proj.w"]


def test_versions_before_are_removed(ranks, stack, tmp_path):
    (tmp_path / "weights" / "99").mkdir(parents=True)
    engine, rank = Engine(stack), ranks(Disk)
    for version in (1, 2):
        rank.send(weights(version), version, engine)
        assert [path.name.split("-")[0] for path in (tmp_path / "weights").iterdir()] == [str(version)]
    rank.sender.close()
    assert not (tmp_path / "weights").exists()


HOOK = """
from pathlib import Path

def show(args, version_dir, rollout_engines):
    files = sorted(path.name for path in Path(version_dir).iterdir())
    with open(args.log, "a") as log:
        log.write(f"{args.rank} {len(files)} {[engine.url for engine in rollout_engines]}\\n")

def asks_an_actor(args, version_dir, rollout_engines):
    rollout_engines[0].pull_weights.remote(1)
"""


@pytest.mark.parametrize("driver", [Disk, Delta])
def test_a_function_of_upstream_is_called_before_engines_load_what_is_written(driver, ranks, stack, tmp_path):
    (tmp_path / "post_write.py").write_text(HOOK)
    hook = {"name": "compat", "python_path": [str(tmp_path)], "args": {"log": str(tmp_path / "log")}}
    engine = Engine(stack)
    engine.refuse = 0
    sending = ranks(driver, post_write_hook={"path": "post_write.show", **hook})
    with pytest.raises(EngineError, match="refused for the test"):
        sending.send(weights(1), 1, engine)
    lines = (tmp_path / "log").read_text().splitlines()
    assert len(lines) == 1
    assert re.fullmatch(rf"0 \d+ \['{engine.endpoint.url}'\]", lines[0])
    assert int(lines[0].split()[1]) > 1
    engine.refuse = None
    sending.send(weights(1), 1, engine)
    assert engine.holds(weights(1))
    assert len((tmp_path / "log").read_text().splitlines()) == 2
    failing = ranks(driver, post_write_hook={"path": "post_write.asks_an_actor", **hook})
    with pytest.raises(
        PluginError, match=r'hook\.path = "post_write\.asks_an_actor", call: .* no "pull_weights": an engine is a'
    ):
        failing.send(weights(2), 2, engine)
    assert engine.holds(weights(1))


def test_only_transports_that_write_files_have_a_hook():
    config = Ipc.Config(post_write_hook={"name": "compat", "path": "my.hook"})
    (problem,) = Ipc.problems(config, SimpleNamespace())
    assert problem.startswith('sync.post_write_hook, sync.transport = "ipc": it writes no files')


def test_a_file_that_is_damaged_after_it_was_written(ranks, stack, monkeypatch):
    engine, rank = Engine(stack), ranks(Disk)
    finish = folder.finish

    def damage(beside, manifest):
        path = finish(beside, manifest)
        file = path / manifest.buckets[1].file
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        return path

    monkeypatch.setattr(folder, "finish", damage)
    with pytest.raises(EngineError, match=r"engine 0 .*bucket 1 of version 1 .*checksum"):
        rank.send(weights(1), 1, engine)
    assert engine.tensors == {}
    # A server without slime's checks is not called at all.
    monkeypatch.setattr(engine.partner, "_check", lambda body: (_ for _ in ()).throw(EngineError("Unsupported action")))
    calls = len(engine.partner.calls)
    with pytest.raises(EngineError, match=r"engines \[0\] were not updated: bucket 1 of version 1 .*checksum"):
        rank.send(weights(1), 1, engine)
    assert "/update_weights_from_disk" not in engine.partner.calls[calls:]


@pytest.mark.parametrize("driver", [Disk, Delta])
def test_a_full_disk(driver, ranks, stack, monkeypatch, tmp_path):
    def full(tensors, path, metadata):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(folder, "save_file", full)
    engine, rank = Engine(stack), ranks(driver)
    with pytest.raises(StorageError, match="no space left"):
        rank.send(weights(1), 1, engine)
    assert list((tmp_path / "weights").iterdir()) == []
    monkeypatch.undo()
    rank.send(weights(1), 1, engine)
    assert engine.holds(weights(1))


def test_shared_memory_is_freed_and_has_no_name(ranks, stack):
    """A killed rank leaves no file that would have to be removed."""
    engine, rank = Engine(stack), ranks(Ipc)
    memory = handles.SharedMemory(flatten([("a", torch.ones(3))], index=0, last=True))
    (shared,) = [link for name in os.listdir("/proc/self/fd") if "slime-weights" in (link := target(name))]
    assert shared == "/memfd:slime-weights (deleted)"
    memory.close()
    rank.send(weights(1), 1, engine)
    engine.refuse = 1
    with pytest.raises(EngineError):
        rank.send(weights(1), 1, engine)
    shared = [link for name in os.listdir("/proc/self/fd") if "slime-weights" in (link := target(name))]
    assert shared == []


def target(name):
    try:
        return os.readlink(f"/proc/self/fd/{name}")
    except FileNotFoundError:
        return ""


def test_a_delta_is_small_and_a_wrong_base_gets_everything(ranks, stack):
    engines = [Engine(stack, 0), Engine(stack, 1)]
    rank = ranks(Delta, update_weight_buffer_size=10**6)
    tensors = {"a.w": torch.randn(100, 100, generator=torch.Generator().manual_seed(0)).to(torch.bfloat16)}
    first = rank.send(tensors, 1, *engines)
    whole = first.bytes_sent
    assert (whole, first.density) == (20_000, None)
    tensors["a.w"][::10, ::10] *= 2
    second = rank.send(tensors, 2, *engines)
    assert second.bytes_sent < 500
    # Every tenth element of every tenth row.
    assert second.density == 0.01
    assert all(engine.holds(tensors) for engine in engines)
    # One engine reports other weights, another one is a new process.
    tensors["a.w"][5, 5] = 7
    engines[0].partner.server.identity = "other"
    assert rank.send(tensors, 3, *engines).bytes_sent > whole
    assert all(engine.holds(tensors) for engine in engines)
    tensors["a.w"][5, 5] = 8
    engines[1].endpoint = replace(engines[1].endpoint, incarnation="second")
    assert rank.send(tensors, 4, *engines).bytes_sent > whole
    assert all(engine.holds(tensors) for engine in engines)
    # Other tensors: nothing to compare with.
    tensors["a.b"] = torch.ones(3)
    assert rank.send(tensors, 5, *engines).bytes_sent > whole
    assert all(engine.holds(tensors) for engine in engines)


def test_deltas_need_a_server_that_can_apply_them(ranks, stack, monkeypatch):
    engine, rank = Engine(stack), ranks(Delta)
    monkeypatch.setattr(engine.partner, "_check", lambda body: (_ for _ in ()).throw(EngineError("Unsupported action")))
    with pytest.raises(EngineError, match="cannot apply deltas"):
        rank.send(weights(1), 1, engine)
    assert "/update_weights_from_disk" not in engine.partner.calls


def test_ipc_needs_the_trainers_devices(tmp_path):
    sender = Ipc.build_sender(Ipc.Config())
    with pytest.raises(EngineError, match="colocate"):
        sender.setup(
            SenderSetup(rank=0, world_size=2, device="cuda", model_path=tmp_path, run_dir=tmp_path, colocated=False)
        )


def test_engines_keep_their_devices_when_others_are_out_of_service(tmp_path):
    """Two engines of two servers of one rank each; engine 0 is lost before the first push."""
    where = {"world_size": 4, "device": "cuda", "model_path": tmp_path, "run_dir": tmp_path, "colocated": True}
    engines = [sglang_endpoint(index=index, url=f"http://e{index}-{n}") for index in range(2) for n in range(2)]
    for rank in range(4):
        sender = Ipc.build_sender(Ipc.Config())
        sender._place = SenderSetup(rank=rank, **where)
        assert sender._engines_from_here(engines[2:]) == ([engines[rank]] if rank > 1 else [])
        assert sender._engines_from_here(engines) == [engines[rank]]
    with pytest.raises(EngineError, match="have 6 ranks"):
        sender._engines_from_here([replace(engine, index=2) for engine in engines[:2]])


def test_two_ranks_that_gather(tmp_path):
    """The second rank has half of every tensor and sends nothing itself; an error on the first does not strand it."""
    script = Path(__file__).parent / "two_ranks.py"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    both = [subprocess.Popen([sys.executable, script, str(rank), tmp_path], env=environment) for rank in range(2)]
    try:
        assert [process.wait(240) for process in both] == [0, 0]
    finally:
        for process in both:
            process.kill()
