"""Checkpoints: complete or absent, whatever fails while they are written."""

import asyncio
import binascii
import errno
import json
import random

import pytest

from slime_core.atomic_io import checksum
from slime_core.controller import checkpoint as room
from slime_core.controller.checkpoint import CheckpointStore, RunState
from slime_core.errors import CheckpointError, StorageError


@pytest.fixture
def store(tmp_path):
    return CheckpointStore(tmp_path / "checkpoints", keep=2)


def save(store, step, *, text="weights", fail=None):
    async def write(folder):
        (folder / "trainer").mkdir()
        (folder / "trainer" / "model.bin").write_text(text)
        if fail is not None:
            raise fail
        (folder / "buffer.json").write_text("[]")

    state = RunState(rollout_id=step, version=step, tokens=7, next_collect=step + 1)
    return store.complete(asyncio.run(store.begin(state, write)))


def names(tmp_path):
    return sorted(path.name for path in (tmp_path / "checkpoints").iterdir())


def test_a_saved_checkpoint_is_loaded(store, tmp_path):
    assert store.load() is None
    folder = save(store, 3)
    state, found = store.load()
    assert state == RunState(rollout_id=3, version=3, tokens=7, next_collect=4)
    assert found == folder == tmp_path / "checkpoints" / "step_3"
    assert (found / "trainer" / "model.bin").read_text() == "weights"


def test_the_newest_complete_checkpoint_is_loaded_and_any_other_by_its_step(store):
    for step in (2, 10, 9):
        save(CheckpointStore(store._folder, keep=9), step)
    assert store.steps() == [2, 9, 10]
    assert store.load()[0].rollout_id == 10
    assert store.load(9)[0].rollout_id == 9
    with pytest.raises(CheckpointError, match=r"no complete checkpoint of step 4; .*2, 9, 10"):
        store.load(4)


def test_no_checkpoint_at_all(store):
    with pytest.raises(CheckpointError, match="no complete checkpoint of step 4"):
        store.load(4)


def test_the_last_few_are_kept(store, tmp_path):
    for step in (1, 2, 3, 4):
        save(store, step)
    assert names(tmp_path) == ["step_3", "step_4"]


@pytest.mark.parametrize("error", [RuntimeError("boom"), asyncio.CancelledError(), StorageError("full")])
def test_a_failure_while_writing_leaves_the_old_one(store, tmp_path, error):
    save(store, 1)
    with pytest.raises(type(error)):
        save(store, 2, fail=error)
    assert store.steps() == [1]
    assert store.load()[0].rollout_id == 1
    save(store, 3)
    assert names(tmp_path) == ["step_1", "step_3"]


def test_a_failure_while_the_same_step_is_written_again_leaves_the_old_one(store):
    save(store, 1, text="first")
    with pytest.raises(RuntimeError):
        save(store, 1, text="second", fail=RuntimeError())
    assert (store.load()[1] / "trainer" / "model.bin").read_text() == "first"
    save(store, 1, text="third")
    assert (store.load()[1] / "trainer" / "model.bin").read_text() == "third"


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_is_reported_and_earlier_checkpoints_stay(store, tmp_path, number):
    save(store, 1)
    save(store, 2)
    with pytest.raises(StorageError, match=r"step_3: no space left .* MiB free.*untouched"):
        save(store, 3, fail=OSError(number, "no"))
    assert names(tmp_path) == ["step_1", "step_2"]


def test_a_disk_that_fills_up_at_the_end_leaves_the_old_one(store, monkeypatch):
    """The marker is the last thing that is written, so nothing before it makes a checkpoint."""
    save(store, 1)
    synced = room.sync

    def full(path):
        if path.name == "COMPLETE":
            raise OSError(errno.ENOSPC, "no space")
        synced(path)

    monkeypatch.setattr(room, "sync", full)
    with pytest.raises(StorageError, match="no space left"):
        save(store, 2)
    assert store.steps() == [1]


def test_other_trouble_with_the_disk_is_a_storage_error_too(store):
    with pytest.raises(StorageError, match=r"step_3: cannot be written: .*read-only"):
        save(store, 3, fail=OSError(errno.EROFS, "read-only"))


def test_all_files_are_synced_before_the_rename(store, monkeypatch):
    seen = []
    monkeypatch.setattr(room, "sync", lambda path: seen.append(path.name))
    save(store, 1)
    before = seen[: seen.index("COMPLETE")]
    assert {"model.bin", "buffer.json", "state.json", "trainer"} <= set(before)
    assert seen[-1] == "checkpoints"


def cut(folder):
    path = folder / "trainer" / "model.bin"
    path.write_text("wei")


def lose(folder):
    (folder / "trainer" / "model.bin").unlink()


@pytest.mark.parametrize(("damage", "found"), [(cut, r"has 3 of 7 bytes"), (lose, "is missing")])
def test_a_checkpoint_that_was_cut_short_names_the_file_and_the_way_out(store, damage, found):
    save(store, 1)
    damage(save(store, 2))
    with pytest.raises(CheckpointError, match=rf"step_2: cut short: trainer/model\.bin {found}.*--ckpt-step 1\."):
        store.load()
    assert store.load(1)[0].rollout_id == 1
    damage(store._folder / "step_1")
    with pytest.raises(CheckpointError, match=r"step_1: .*--fresh"):
        store.load(1)


def test_a_checkpoint_that_is_cut_at_any_byte_is_refused(store):
    """Also the marker itself."""
    folder = save(store, 1)
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        content = path.read_bytes()
        for length in range(len(content)):
            path.write_bytes(content[:length])
            with pytest.raises(CheckpointError, match=rf"step_1: (cut short|damaged): .*{path.name}"):
                store.load()
        path.write_bytes(content)
    assert store.load() is not None


def test_a_checkpoint_with_any_other_byte_is_refused(store):
    save(store, 1)
    folder = save(store, 2)
    for path in [path for path in folder.rglob("*") if path.is_file()]:
        content = path.read_bytes()
        for place in range(len(content)):
            path.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
            with pytest.raises(CheckpointError, match=r"step_2: (cut short|damaged): .*--ckpt-step 1"):
                store.load()
        path.write_bytes(content)
    (folder / "COMPLETE").write_text("{}")
    with pytest.raises(CheckpointError, match=r"damaged: COMPLETE lists no state\.json"):
        store.load()


def test_checksums_are_crc_32_by_pieces(tmp_path, monkeypatch):
    monkeypatch.setattr(checksum, "PIECE", 1000)
    files = {tmp_path / str(size): random.Random(size).randbytes(size) for size in (0, 1, 999, 1000, 1001, 12345)}
    for path, content in files.items():
        path.write_bytes(content)
    expected = []
    for content in files.values():
        pieces = [content[start : start + 1000] for start in range(0, len(content), 1000)]
        expected.append(binascii.crc32(b"".join(binascii.crc32(piece).to_bytes(4, "little") for piece in pieces)))
    assert checksum.checksums(list(files)) == [f"{number:08x}" for number in expected]


def test_without_the_marker_it_is_not_there(store):
    folder = save(store, 1)
    (folder / "COMPLETE").unlink()
    assert store.load() is None


def test_folders_of_others_are_left_alone(store, tmp_path):
    save(store, 1)
    for name in ("step_1.bak", "step_x"):
        (tmp_path / "checkpoints" / name).mkdir()
        (tmp_path / "checkpoints" / name / "COMPLETE").write_text("{}")
    assert store.steps() == [1]
    save(store, 2)
    save(store, 3)
    assert names(tmp_path) == ["step_1.bak", "step_2", "step_3", "step_x"]


def test_another_format_is_refused(store):
    folder = save(store, 1)
    text = json.dumps(json.loads((folder / "state.json").read_text()) | {"format": 99}, indent=1)
    (folder / "state.json").write_text(text)
    # Sizes alone, as 0.2 wrote them.
    written = json.loads((folder / "COMPLETE").read_text())
    sizes = {name: entry["size"] for name, entry in written.items()} | {"state.json": len(text)}
    (folder / "COMPLETE").write_text(json.dumps(sizes))
    with pytest.raises(CheckpointError, match="written in format 99; this slime reads format 2"):
        store.load()


def test_an_older_checkpoint_is_continued_from(store, tmp_path):
    """Later checkpoints are set aside: the newest one on the disk belongs to this run."""
    many = CheckpointStore(store._folder, keep=9)
    for step in (1, 2, 3):
        save(many, step)
    many.set_aside_after(1)
    assert many.steps() == [1]
    save(many, 2, text="again")
    assert (many.load()[1] / "trainer" / "model.bin").read_text() == "again"


def test_remains_of_a_removal_are_removed_with_the_next_checkpoint(store, tmp_path):
    """A removal that was killed had deleted the marker first: without this, the rest would stay for ever."""
    save(store, 1)
    (tmp_path / "checkpoints" / "step_1" / "COMPLETE").unlink()
    save(store, 2)
    assert names(tmp_path) == ["step_2"]
