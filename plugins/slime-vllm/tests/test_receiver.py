"""What a worker reads, without vLLM: folders that the trainer's first rank writes, and handles of its memory."""

import base64
import json
import sys
from types import SimpleNamespace

import pytest
import torch
from torch.multiprocessing import reductions

import slime_vllm
from slime_core.contracts.transport import SenderSetup
from slime_core.errors import EngineError
from slime_transports import folder
from slime_transports.device_handle import DeviceHandle
from slime_transports.flattened_bucket import flatten
from slime_transports.in_process_server import InProcessReceiver, serve
from slime_transports.plugin import Delta, Disk
from slime_transports.receiver import Refused, ServerEndpoint
from slime_vllm.receiver import VllmReceiver

# As in vLLM's interpreter.
sys.path.insert(0, f"{slime_vllm.__path__[0]}/server")

from slime_vllm_server import folders, memory_handles


def weights(seed):
    generator = torch.Generator().manual_seed(seed)
    shapes = {"a.0.w": (5, 3), "a.0.bias": (7,), "a.1.w": (4, 4), "empty": (0, 2), "head": (9, 2)}
    found = {name: torch.randn(shape, generator=generator).bfloat16() for name, shape in shapes.items()}
    return found | {"a.0.scale": torch.randn(3, generator=generator)}


class Reading(InProcessReceiver):
    """Loads folders as vLLM's workers do."""

    zlib = True
    loaded = folders.LoadedFolder()
    held = {}

    async def load_folder(self, path, version):
        if problem := self.loaded.problem(path):
            raise Refused(f"{self.server.name}: {problem}")
        self.held.clear()
        self.held.update({name: tensor.clone() for name, tensor in self.loaded.tensors(path)})


@pytest.fixture
def sent(tmp_path):
    """`sent(Disk)(tensors, version)`: sends them to a worker; returns the report."""
    senders = []

    def build(driver):
        sender = driver.build_sender(driver.Config(update_weight_buffer_size=40, update_weights_timeout=10))
        where = {"model_path": tmp_path, "run_dir": tmp_path / driver.__name__}
        sender.setup(SenderSetup(rank=0, world_size=1, device="cpu", colocated=True, **where))
        senders.append(sender)

        def send(tensors, version):
            return sender.send(
                lambda *, all_ranks: ({name: tensor} for name, tensor in tensors.items()), version, [endpoint]
            )

        return send

    with serve(lambda bucket: None) as url:
        endpoint = ServerEndpoint(index=0, url=url, receiver=Reading)
        yield build
        for sender in senders:
            sender.close()


def require_held(expected):
    assert sorted(Reading.held) == sorted(expected)
    for name, tensor in expected.items():
        assert Reading.held[name].dtype == tensor.dtype
        assert torch.equal(Reading.held[name], tensor), name


def test_a_worker_reads_folders_and_deltas(sent):
    disk, delta = sent(Disk), sent(Delta)
    disk(weights(1), 1)
    require_held(weights(1))
    delta(weights(2), 2)
    require_held(weights(2))
    changed = weights(2)
    changed["a.1.w"][2, 3] += 1
    changed["a.0.scale"][0] = -0.0
    report = delta(changed, 3)
    require_held(changed)
    assert report.density == pytest.approx(2 / 59)
    # Weights that came in another way are no base: all are sent.
    Reading.loaded.forget()
    assert delta(weights(4), 4).density is not None
    require_held(weights(4))


@pytest.mark.parametrize("kind", [Disk, Delta])
def test_a_worker_loads_nothing_of_a_damaged_folder(kind, sent, monkeypatch):
    send = sent(kind)
    send(weights(1), 1)
    finish = folder.finish

    def damage(beside, manifest):
        path = finish(beside, manifest)
        file = path / manifest.buckets[1].file
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        return path

    with monkeypatch.context() as patched:
        patched.setattr(folder, "finish", damage)
        with pytest.raises(EngineError, match=r"engine 0 .*bucket 1 of version 2 .*is damaged: checksum"):
            send(weights(2), 2)
    require_held(weights(1))
    send(weights(3), 3)
    require_held(weights(3))


def test_names_that_both_interpreters_know():
    assert (folders.MANIFEST, folders.WRONG_BASE) == (folder.MANIFEST, folder.WRONG_BASE)


def test_a_handle_reaches_torch_as_it_was(monkeypatch):
    """The arguments that torch made of a tensor in the trainer, with the device's number in the worker."""
    bucket = flatten([("a", torch.arange(12.0))], index=0, last=True)
    made = (torch.Tensor, bucket.data.size(), bucket.data.stride(), 0, torch.UntypedStorage, torch.uint8, "uuid-3")
    made += (b"handle\x00\xff", 4096, 512, False, b"/torch_1", 5, b"event\x01", True)
    seen = []
    monkeypatch.setattr(memory_handles, "rebuild_cuda_tensor", lambda *given: seen.append(given) or bucket.data)
    monkeypatch.setattr(
        torch.cuda, "get_device_properties", lambda device: SimpleNamespace(uuid=f"uuid-{device.index}")
    )
    payload = VllmReceiver.opened(DeviceHandle(reductions.rebuild_cuda_tensor, made), bucket)
    copy = memory_handles.opened(payload, torch.device("cuda", 3), copies=True)
    assert seen == [(*made[:6], 3, *made[7:])]
    assert torch.equal(copy, bucket.data)
    assert copy.data_ptr() != bucket.data.data_ptr()
    lent = memory_handles.opened(payload, torch.device("cuda", 3), copies=False)
    assert lent.data_ptr() == bucket.data.data_ptr()
    with pytest.raises(ValueError, match="the handle is of device uuid-3, this worker's is uuid-1"):
        memory_handles.opened(payload, torch.device("cuda", 1), copies=True)
    assert base64.b64decode(json.loads(payload)["handle"]) == made[7]
