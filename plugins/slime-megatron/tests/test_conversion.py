"""`slime convert` between Hugging Face folders and torch_dist: equal to the bit, for every layout, and after a kill."""

import json
import shutil

import pytest
import torch
from families import make_family
from safetensors.torch import load_file
from torch.distributed.checkpoint import FileSystemReader

from slime_core.config.bound import PartSpec
from slime_core.convert import convert
from slime_core.errors import CheckpointError, ModelError
from slime_core.registry import Registry

pytestmark = pytest.mark.megatron

FAMILY, LINEAR = "qwen3-moe", "qwen3-next"


def part(name, **options):
    return PartSpec(group="slime.converters", name=name, options=options).resolve(Registry())


def run(name, source, target, *, workers=1, **options):
    told = []
    done = convert(part(name, **options), source, target, workers=workers, tell=lambda *news: told.append(news))
    assert told[-1] == ("comparing", told[-1][2], told[-1][2])
    return done


def weights_of(folder):
    found = {}
    for file in folder.glob("*.safetensors"):
        found |= load_file(file)
    return found


def assert_equal(folder, source):
    got, expected = weights_of(folder), weights_of(source)
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_family(tmp_path_factory.mktemp("model") / FAMILY, FAMILY)


@pytest.fixture(scope="module")
def torch_dist(model, tmp_path_factory):
    target = tmp_path_factory.mktemp("converted") / "torch_dist"
    done = run("torch_dist", model, target)
    assert done.num_pieces == 5
    assert not target.with_name("torch_dist.converting").exists()
    return target


@pytest.mark.slow
def test_there_and_back_by_the_command(make_project, torch_dist, model, tmp_path):
    project = make_project(tmp_path / "project")
    told = project.slime("convert", str(torch_dist), "back", "--to", "hf", "--workers", "2")
    assert told.returncode == 0, told.stderr
    assert "read back and equal" in told.stdout
    assert_equal(tmp_path / "project/back", model)
    config = json.loads((tmp_path / "project/back/config.json").read_text())
    assert config == json.loads((model / "config.json").read_text())
    for words, said in {
        ("convert", "base", "x", "--to", "torch_dits"): "close match: torch_dist",
        ("convert", "base", "x", "--to", "hf", "--hf-checkpiont", "y"): "close match: --hf-checkpoint",
        ("convert", "base", "base", "--to", "torch_dist"): "base: exists already",
        ("convert", "base", "x", "--to", "hf"): "no torch_dist checkpoint there",
    }.items():
        told = project.slime(*words)
        assert told.returncode != 0
        assert "Traceback" not in told.stderr
        assert said in told.stderr


@pytest.fixture(scope="module")
def linear(tmp_path_factory):
    folder = make_family(tmp_path_factory.mktemp("linear") / "model", LINEAR)
    run("torch_dist", folder, folder.with_name("torch_dist"))
    return folder


@pytest.fixture(scope="module")
def layouts(torch_dist, model, linear, tmp_path_factory):
    """Each layout reads it into its own parts of the model, and saves it again as it would in training."""
    from conftest import run_layouts

    kept = tmp_path_factory.mktemp("kept")
    tp2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
    options = {"tp2-sp": tp2, "pp2": {"pipeline_model_parallel_size": 2}, "ep2": {"expert_model_parallel_size": 2}}
    sources = {
        **{name: (FAMILY, model, torch_dist, of) for name, of in options.items()},
        "linear, tp2-sp": (LINEAR, linear, linear.with_name("torch_dist"), tp2),
    }
    cases, folders = {}, {}
    for name, (family, folder, converted, of) in sources.items():
        other = make_family(tmp_path_factory.mktemp("model") / "other", family, seed=8)
        told = {"convert": str(converted), "save": str(kept / name)}
        cases[name] = {"model": str(other), "world_size": 2, "options": of, **told}
        folders[name] = folder
    return run_layouts(tmp_path_factory.mktemp("layouts"), cases), kept, folders


@pytest.mark.parametrize("layout", ["tp2-sp", "pp2", "ep2", "linear, tp2-sp"])
def test_every_layout_reads_it_and_what_it_saves_comes_back(layouts, layout, tmp_path):
    ranks, kept, folders = layouts
    model = folders[layout]
    (first, *_) = ranks.ranks(layout)
    expected = weights_of(model)
    assert all(torch.equal(first["before"][name], tensor) for name, tensor in expected.items())
    with pytest.raises(ModelError, match="--hf-checkpoint"):
        run("hf", kept / layout, tmp_path / "back")
    run("hf", kept / layout, tmp_path / "back", hf_checkpoint=str(model))
    got = weights_of(tmp_path / "back")
    assert got.keys() == expected.keys()
    # One step of descent was made before it was saved.
    assert all(torch.equal(got[name], tensor) for name, tensor in first["after"].items())


def test_a_killed_conversion_goes_on(model, tmp_path, monkeypatch):
    from slime_megatron.conversion import ToTorchDist

    target = tmp_path / "out"

    def killed(*told):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ToTorchDist, "finish", killed)
        with pytest.raises(KeyboardInterrupt):
            run("torch_dist", model, target)
    work = tmp_path / "out.converting"
    journal = work / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    assert len(lines) == 6
    # The last line but one is whole, the last one was being written.
    journal.write_text("".join(lines[:4]) + lines[4][:20])
    done = run("torch_dist", model, target)
    assert (done.num_resumed, done.num_pieces) == (3, 5)
    assert not work.exists()


def test_what_the_disk_lost_is_found(model, tmp_path, monkeypatch):
    from slime_megatron.conversion import ToTorchDist

    finish = ToTorchDist.finish

    def damaged(self, source, folders, target):
        finish(self, source, folders, target)
        largest = max(FileSystemReader(target).read_metadata().storage_data.values(), key=lambda part: part.length)
        file = target / largest.relative_path
        content = bytearray(file.read_bytes())
        # Inside of a tensor, behind the header of its archive.
        content[largest.offset + largest.length // 2] ^= 1
        file.write_bytes(content)

    monkeypatch.setattr(ToTorchDist, "finish", damaged)
    with pytest.raises((ModelError, CheckpointError), match=r"read back|is not there"):
        run("torch_dist", model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_source_does_not_go_on_with_it(model, tmp_path):
    other = make_family(tmp_path / "other", FAMILY, seed=8)
    shutil.copytree(model, tmp_path / "model")
    work = tmp_path / "out.converting"
    work.mkdir()
    (work / "journal.jsonl").write_text(json.dumps({"source": "elsewhere"}) + "\n")
    with pytest.raises(ModelError, match="unfinished conversion with other"):
        run("torch_dist", other, tmp_path / "out")
