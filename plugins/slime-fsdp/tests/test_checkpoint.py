"""Save and load: the same bits after a resume, and an error that names the file when something is missing."""

import json
import random
from datetime import timedelta

import numpy as np
import pytest
import torch
import torch.distributed.checkpoint as dcp

from slime_core.errors import CheckpointError

ADAM = {"lr": 0.01, "lr_warmup_iters": 2, "lr_decay_style": "cosine", "min_lr": 0.001}


def same(one, other):
    assert one.keys() == other.keys()
    return all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.bits
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_resume_gives_the_same_bits(family, folders, start, weights_of, train, tmp_path):
    straight = start(folders(family), None, ADAM)
    train(straight, 2)
    middle = weights_of(straight)
    straight.save(tmp_path)
    reports = train(straight, 3, first=2)

    resumed = start(folders(family), None, ADAM)
    train(resumed, 1)
    resumed.load(tmp_path)
    assert same(weights_of(resumed), middle)
    again = train(resumed, 3, first=2)
    assert same(weights_of(resumed), weights_of(straight))
    assert not same(weights_of(resumed), middle)
    assert [report.lr for report in again] == [report.lr for report in reports]
    assert [report.sums for report in again] == [report.sums for report in reports]


@pytest.mark.bits
def test_two_runs_are_the_same_bits(folders, start, weights_of, train):
    runs = [start(folders("qwen3"), None, ADAM) for _ in range(2)]
    assert [r.sums for r in train(runs[0], 3)] == [r.sums for r in train(runs[1], 3)]
    assert same(weights_of(runs[0]), weights_of(runs[1]))


@pytest.mark.bits
def test_a_checkpoint_before_the_first_step_can_be_resumed(folders, start, weights_of, train, tmp_path):
    straight = start(folders("qwen3"), None, ADAM)
    straight.save(tmp_path)
    train(straight, 2)
    resumed = start(folders("qwen3"), None, ADAM)
    resumed.load(tmp_path)
    train(resumed, 2)
    never_saved = start(folders("qwen3"), None, ADAM)
    train(never_saved, 2)
    assert same(weights_of(resumed), weights_of(straight))
    assert same(weights_of(never_saved), weights_of(straight))


def test_random_generators_are_restored(folders, start, tmp_path):
    backend = start(folders("qwen3"))
    np.random.standard_normal(3)
    random.gauss(0, 1)
    backend.save(tmp_path)

    def draw():
        return [random.gauss(0, 1), random.random(), *np.random.standard_normal(3), *torch.randn(3).tolist()]

    drawn = draw()
    assert draw() != drawn
    backend.load(tmp_path)
    assert draw() == drawn


@pytest.mark.bits
def test_a_refreshed_copy_is_saved_and_an_untouched_one_is_not(folders, start, pack, samples, train, tmp_path):
    frozen_models = {"reference": folders("qwen3"), "teacher": folders("llama")}
    backend = start(folders("qwen3"), None, ADAM, frozen_models=frozen_models)
    train(backend, 3)
    backend.update_frozen_model("reference")
    train(backend, 2)
    expected = backend.forward_only([pack(samples)], weights="reference")[0].log_probs
    backend.save(tmp_path)
    assert not any("teacher" in name for name in json.loads((tmp_path / "fsdp.json").read_text())["shapes"])
    resumed = start(folders("qwen3"), None, ADAM, frozen_models=frozen_models)
    assert not np.array_equal(resumed.forward_only([pack(samples)], weights="reference")[0].log_probs, expected)
    resumed.load(tmp_path)
    np.testing.assert_array_equal(resumed.forward_only([pack(samples)], weights="reference")[0].log_probs, expected)


@pytest.mark.bits
def test_a_staged_checkpoint_equals_a_direct_one(folders, start, train, contents, tmp_path):
    """It is written after another step, twice, in memory that is used again."""
    frozen_models = {"reference": folders("qwen3")}
    backend = start(folders("qwen3"), None, ADAM, frozen_models=frozen_models)
    backend.update_frozen_model("reference")
    for number in range(2):
        train(backend, 1)
        at_once, later = tmp_path / f"at_once{number}", tmp_path / f"later{number}"
        at_once.mkdir()
        later.mkdir()
        backend.save(at_once)
        write = backend.stage(later)
        train(backend, 1)
        np.random.standard_normal(1)
        assert not list(later.iterdir())
        write()
        assert contents(later) == contents(at_once)
    backend.load(tmp_path / "later0")


def test_ranks_that_have_written_wait_for_one_that_writes_for_hours(folders, start, monkeypatch, tmp_path):
    """A thread that writes beside training uses a group of its own. Lower precision requires process groups."""
    groups, save = [], dcp.save

    def note(*given, process_group, **kwargs):
        groups.append(process_group)
        return save(*given, process_group=process_group, **kwargs)

    monkeypatch.setattr(dcp, "save", note)
    backend = start(folders("qwen3"), {"precision": "bfloat16"})
    try:
        for name in ("at_once", "later"):
            (tmp_path / name).mkdir()
        backend.save(tmp_path / "at_once")
        backend.stage(tmp_path / "later")()
        assert len({id(group) for group in groups}) == 2
        for group in groups:
            assert group._get_backend(torch.device("cpu")).options._timeout >= timedelta(hours=12)
    finally:
        backend.close()


def test_nothing_in_a_checkpoint_is_a_pickle(folders, start, train, tmp_path):
    backend = start(folders("qwen3"), None, ADAM)
    train(backend, 1)
    backend.save(tmp_path)
    assert {file.suffix for file in tmp_path.rglob("*") if file.is_file()} == {".safetensors", ".json"}


def damage(folder, name, how):
    (file,) = folder.glob(name)
    if how == "absent":
        file.unlink()
    else:
        file.write_bytes(file.read_bytes()[:-5])
    return file


@pytest.mark.parametrize("how", ["absent", "cut"])
@pytest.mark.parametrize("name", ["fsdp.json", "state/*.safetensors", "rng_0.safetensors"])
def test_a_damaged_checkpoint_is_refused_by_file_name(how, name, folders, start, weights_of, train, tmp_path):
    backend = start(folders("qwen3"), None, ADAM)
    train(backend, 1)
    before = weights_of(backend)
    backend.save(tmp_path)
    file = damage(tmp_path, name, how)
    with pytest.raises(CheckpointError, match=file.name):
        backend.load(tmp_path)
    assert same(weights_of(backend), before)


def test_a_checkpoint_of_another_shape_is_refused(folders, start, train, tmp_path, sgd):
    backend = start(folders("qwen3"), None, ADAM)
    train(backend, 1)
    backend.save(tmp_path)
    with pytest.raises(CheckpointError, match="another model, optimizer"):
        start(folders("llama"), None, ADAM).load(tmp_path)
    with pytest.raises(CheckpointError, match=r"optimizer\.exp_avg"):
        start(folders("qwen3"), None, sgd).load(tmp_path)
