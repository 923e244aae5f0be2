"""Model folders that are written while weights are gathered: memory use, which rank writes what, and the state of a folder
after an error."""

import errno
import json
import weakref
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import huggingface_hub
import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from slime_core.data.model_folder import check_weights
from slime_core.errors import ModelError, StorageError
from slime_training import saved_model
from slime_training.saved_model import Shards, write_model

ROW_BYTES = 4 * 256


def rows(count, start=0.0):
    return [(f"row.{number}", torch.full((256,), start + number)) for number in range(count)]


def written(target, weights, **kwargs):
    write_model(iter(weights), target, describe=lambda: (target / "config.json").write_text("{}"), **kwargs)
    return sorted(path.name for path in target.iterdir())


class Rows(nn.Module):
    def __init__(self, count):
        super().__init__()
        self.row = nn.ParameterList(torch.zeros(256) for _ in range(count))


def test_weights_are_in_files_of_the_requested_size(tmp_path):
    names = written(tmp_path, rows(7), shard_bytes=3 * ROW_BYTES)
    shards = [f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)]
    assert names == ["config.json", *shards, "model.safetensors.index.json"]
    assert [len(load_file(tmp_path / name)) for name in shards] == [3, 3, 1]
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"] == {"total_size": 7 * ROW_BYTES}
    model = Rows(7)
    huggingface_hub.load_torch_model(model, tmp_path, strict=True)
    assert [float(row.detach()[-1]) for row in model.row] == list(range(7))


def test_a_model_that_fits_has_one_file(tmp_path):
    assert written(tmp_path, rows(3)) == ["config.json", "model.safetensors"]


def test_a_tensor_that_is_larger_has_a_file_of_its_own(tmp_path):
    large = ("large", torch.zeros(5, 256))
    written(tmp_path, [*rows(1), large, ("empty", torch.zeros(0, 4)), ("last", torch.ones(1))], shard_bytes=ROW_BYTES)
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["weight_map"] == {
        "row.0": "model-00001-of-00003.safetensors",
        "large": "model-00002-of-00003.safetensors",
        "empty": "model-00003-of-00003.safetensors",
        "last": "model-00003-of-00003.safetensors",
    }


def test_written_tensors_are_copies(tmp_path):
    """Views of one tensor, one of them transposed: safetensors would refuse both."""
    whole = torch.arange(12.0).view(3, 4)
    written(tmp_path, [("all", whole), ("turned", whole.t()), ("row", whole[1])])
    saved = load_file(tmp_path / "model.safetensors")
    assert torch.equal(saved["all"], whole)
    assert torch.equal(saved["turned"], whole.t())
    assert torch.equal(saved["row"], whole[1])


class Counted(torch.Tensor):
    """Tensors that are counted while anything holds them, including their copies."""

    alive = weakref.WeakSet()

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        out = super().__torch_function__(function, types, args, kwargs or {})
        if isinstance(out, Counted):
            cls.alive.add(out)
        return out


def test_no_more_than_one_file_is_held_at_a_time(tmp_path, monkeypatch):
    most = 0
    save_file = saved_model.save_file

    def counting(tensors, file, **kwargs):
        nonlocal most
        most = max(most, len(Counted.alive))
        save_file({name: tensor.as_subclass(torch.Tensor) for name, tensor in tensors.items()}, file, **kwargs)

    monkeypatch.setattr(saved_model, "save_file", counting)

    def stream():
        nonlocal most
        for name, tensor in rows(40):
            yield name, tensor.as_subclass(Counted)
            most = max(most, len(Counted.alive))

    write_model(stream(), tmp_path, describe=lambda: None, shard_bytes=4 * ROW_BYTES)
    # The copies of one file, and the tensor that comes with the first of the next.
    assert 4 <= most <= 6
    assert not Counted.alive
    assert len(list(tmp_path.glob("model-*.safetensors"))) == 10


def test_ranks_write_every_nth_file(tmp_path):
    for rank in range(3):
        with ThreadPoolExecutor(1) as writer:
            shards = Shards(tmp_path, rank=rank, ranks=3, shard_bytes=2 * ROW_BYTES, writer=writer)
            before = set(tmp_path.iterdir())
            for name, tensor in rows(9):
                shards.add(name, tensor)
            shards.close()
        assert shards.ended == 5
        mine = sorted(path.name for path in set(tmp_path.iterdir()) - before)
        assert mine == [f"{number:05d}.safetensors" for number in range(rank, 5, 3)]
    for number in range(5):
        held = load_file(tmp_path / f"{number:05d}.safetensors")
        assert {name: float(tensor[0]) for name, tensor in held.items()} == {
            f"row.{row}": row for row in range(9) if row // 2 == number
        }


def test_weights_that_were_there_are_replaced(tmp_path):
    written(tmp_path, rows(9), shard_bytes=ROW_BYTES)
    (tmp_path / "tokenizer.json").write_text("{}")
    names = written(tmp_path, rows(4, start=10.0), shard_bytes=2 * ROW_BYTES)
    shards = ["model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"]
    assert names == ["config.json", *shards, "model.safetensors.index.json", "tokenizer.json"]
    assert float(load_file(tmp_path / shards[1])["row.3"][0]) == 13.0
    assert written(tmp_path, rows(1)) == ["config.json", "model.safetensors", "tokenizer.json"]


def test_an_export_that_ends_early_changes_nothing(tmp_path):
    written(tmp_path, rows(3))

    def breaks():
        yield from rows(9, start=10.0)
        raise ModelError("a gather that failed")

    with pytest.raises(ModelError, match="a gather that failed"):
        write_model(breaks(), tmp_path, describe=lambda: None, shard_bytes=2 * ROW_BYTES)
    check_weights(tmp_path)
    assert (tmp_path / "config.json").is_file()
    assert float(load_file(tmp_path / "model.safetensors")["row.2"][0]) == 2.0
    # The next attempt deletes the files of the failed one.
    assert written(tmp_path, rows(3)) == ["config.json", "model.safetensors"]


def test_an_incomplete_folder_has_no_config(tmp_path):
    written(tmp_path, rows(3))

    def describe():
        assert not (tmp_path / "config.json").exists()
        raise OSError(errno.EIO, "Input/output error")

    with pytest.raises(StorageError, match=r"cannot be written: \[Errno 5\]"):
        write_model(iter(rows(5)), tmp_path, describe=describe, shard_bytes=2 * ROW_BYTES)
    assert not (tmp_path / "config.json").exists()


def test_a_failed_write_is_raised_at_the_end(tmp_path, monkeypatch):
    """Not before: the other ranks are waiting in the next gather."""
    seen = []

    def refuses(tensors, file, **kwargs):
        seen.append(sorted(tensors))
        raise OSError(errno.ENOSPC, "No space left on device")

    def stream():
        yield from rows(8)
        seen.append("all")

    monkeypatch.setattr(saved_model, "save_file", refuses)
    with pytest.raises(StorageError, match=r"no space left to write it \(.* MiB free\)"):
        write_model(stream(), tmp_path, describe=lambda: None, shard_bytes=2 * ROW_BYTES)
    assert seen == [["row.0", "row.1"], "all"]
    assert not list(tmp_path.iterdir())


def test_a_rank_that_does_not_see_the_folder_raises(tmp_path, monkeypatch):
    """Before anything is gathered."""
    monkeypatch.setattr(saved_model, "raise_on_all_ranks", lambda work, group, ranks: work())
    second = SimpleNamespace(rank=lambda: 1, size=lambda: 2)

    def stream():
        raise AssertionError("gathered")
        yield

    with pytest.raises(
        StorageError, match=r"rank 1 does not see \.weights\.writing.*all machines must share this folder"
    ):
        write_model(stream(), tmp_path, describe=lambda: None, group=second)
