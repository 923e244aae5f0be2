"""Tensors that are offloaded and restored in place, and copies in memory that is kept. On a CPU, where only the locking is
missing."""

import threading

import pytest
import torch

from slime_core.errors import TrainingError
from slime_training.host_memory import HostCopy, HostMemory
from slime_training.offload import TensorOffloader, TrainerOffloader

CPU = torch.device("cpu")


def test_tensors_are_restored_with_their_views() -> None:
    torch.manual_seed(0)
    whole = torch.randn(7, 5)
    view, single, count = whole[2:4].t(), torch.randn(3).bfloat16(), torch.tensor(4.0)
    before = [tensor.clone() for tensor in (whole, view, single, count)]
    offloader = TensorOffloader(CPU)
    offloader.offload([view, single, whole, count, torch.empty(0)])
    assert [tensor.untyped_storage().nbytes() for tensor in (whole, view, single, count)] == [0, 0, 0, 0]
    offloader.onload()
    for tensor, expected in zip((whole, view, single, count), before, strict=True):
        torch.testing.assert_close(tensor, expected, rtol=0, atol=0)
    whole[3, 1] = 9
    assert view[1, 1] == 9, "the view is of other memory"


def test_offload_and_onload_twice_lose_nothing() -> None:
    tensor = torch.arange(6.0)
    offloader = TensorOffloader(CPU)
    for steps in range(2):
        offloader.offload([tensor])
        offloader.offload([tensor])
        offloader.onload()
        offloader.onload()
        assert tensor.tolist() == [number + steps for number in range(6)]
        tensor += 1


def test_tensors_that_share_memory_with_excluded_ones_stay() -> None:
    weights, moment = torch.ones(4), torch.full((4,), 2.0)
    others, all_of_it = TensorOffloader(CPU), TensorOffloader(CPU)
    others.offload([weights[1:], moment], but=[weights])
    assert weights.tolist() == [1, 1, 1, 1]
    assert moment.untyped_storage().nbytes() == 0
    all_of_it.offload([weights])
    all_of_it.onload()
    others.onload()
    assert (weights.sum(), moment.sum()) == (4, 8)


def test_a_failed_onload_restores_nothing_and_can_be_repeated(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [torch.full((4,), float(number)) for number in range(3)]
    offloader = TensorOffloader(CPU)
    offloader.offload(tensors)
    room, resize = 2, torch.UntypedStorage.resize_

    def resized(storage: torch.UntypedStorage, nbytes: int) -> torch.UntypedStorage:
        nonlocal room
        if nbytes and not room:
            raise torch.OutOfMemoryError("no room")
        room -= bool(nbytes)
        return resize(storage, nbytes)

    with monkeypatch.context() as patched:
        patched.setattr(torch.UntypedStorage, "resize_", resized)
        with pytest.raises(torch.OutOfMemoryError):
            offloader.onload()
    assert [tensor.untyped_storage().nbytes() for tensor in tensors] == [0, 0, 0]
    offloader.onload()
    assert [tensor.tolist() for tensor in tensors] == [[number] * 4 for number in range(3)]


def test_tensors_of_another_device_are_unchanged() -> None:
    elsewhere = torch.ones(3, device="meta")
    offloader = TensorOffloader(CPU)
    offloader.offload([elsewhere])
    offloader.onload()
    assert elsewhere.untyped_storage().nbytes() == 12


def test_memory_is_kept_until_it_has_to_be_larger() -> None:
    memory = HostMemory(CPU)
    first = memory.room(1000).data_ptr()
    assert memory.room(10).data_ptr() == first
    assert len(memory.room(10)) == 10
    assert len(memory.room(2000)) == 2000


def test_copies_have_the_values_of_their_moment() -> None:
    tensors = {"a": torch.arange(6).view(2, 3).t(), "b": torch.tensor(2.5, dtype=torch.bfloat16), "c": torch.empty(0)}
    copy = HostCopy(CPU)
    found = copy.of(tensors)
    tensors["a"] += 1
    assert found["a"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert found["a"].is_contiguous()
    assert found["b"] == 2.5
    assert found["c"].shape == (0,)
    assert all(value.untyped_storage().nbytes() == value.nbytes for value in found.values()), "a writer would copy it"
    assert copy.of(tensors)["a"].data_ptr() == found["a"].data_ptr(), "memory was taken anew"
    assert found["a"].tolist() == [[1, 4], [2, 5], [3, 6]]


def test_memory_that_cannot_be_locked_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    class Refusing:
        @staticmethod
        def cudaHostRegister(address: int, nbytes: int, flags: int) -> int:
            return 2

    def reminded(*size: int, device: torch.device) -> torch.Tensor:
        raise RuntimeError("CUDA error: out of memory, from before")

    monkeypatch.setattr(torch.cuda, "cudart", Refusing)
    monkeypatch.setattr(torch, "zeros", reminded)
    memory = HostMemory(torch.device("cuda"))
    message = r"2\.0 GiB of the host's memory could not be locked.*offload_train"
    for _ in range(2):
        with pytest.raises(TrainingError, match=message):
            memory.room(2**31)


def test_the_first_sleep_does_not_wait_for_the_memory_of_moments(monkeypatch):
    """It is for what the first step creates, and locking it takes many seconds."""
    locked, grow = threading.Event(), HostMemory._grow_in_thread

    def slowly(memory, nbytes):
        locked.wait(20)
        grow(memory, nbytes)

    monkeypatch.setattr(HostMemory, "_grow_in_thread", slowly)
    offloader, weights, main = TrainerOffloader(CPU), torch.ones(8), torch.ones(8, dtype=torch.float64)
    moments = torch.full((8,), 3.0)
    offloader.expect([moments.nbytes])
    offloader.sleep([weights], [main, weights[:4]], [], keep_weights=True)
    assert (main.untyped_storage().nbytes(), weights.untyped_storage().nbytes()) == (0, 32)
    offloader.wake_up(weights_only=False)
    assert not locked.is_set()
    locked.set()
    offloader.sleep([weights], [main], [moments], keep_weights=False)
    assert [tensor.untyped_storage().nbytes() for tensor in (weights, main, moments)] == [0, 0, 0]
    offloader.wake_up(weights_only=True)
    assert [tensor.untyped_storage().nbytes() for tensor in (weights, main, moments)] == [32, 0, 0]
    offloader.wake_up(weights_only=False)
    assert (weights.sum(), main.sum(), moments.sum()) == (8, 8, 24)
