"""`slime convert` between Hugging Face folders and torch_dist: equal to the bit, for every layout, and after a kill."""

import json
import re
import shutil
from concurrent.futures import Executor, Future

import pytest
import torch
import torch.distributed as dist
from families import make_family
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint import FileSystemReader

from slime_core.config.part import PluginSpec
from slime_core.errors import CheckpointError, ModelError
from slime_core.registry import Registry
from slime_models.convert import convert

pytestmark = pytest.mark.megatron

FAMILY, EXPERTS, LINEAR = "qwen3", "qwen3-moe", "qwen3.5-moe"

TOWER = "model.visual."


class HereExecutor(Executor):
    """Runs in this process: a worker would import Megatron again."""

    def __init__(self, *args, **kwargs):
        pass

    def submit(self, function, *words):
        done = Future()
        done.set_result(function(*words))
        return done


@pytest.fixture(scope="module", autouse=True)
def without_workers():
    """Workers are tested with the command."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("slime_models.convert.ProcessPoolExecutor", HereExecutor)
        yield
    # Not at the top: other targets collect this file where Megatron is not installed.
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()


def part(name, **options):
    return PluginSpec(group="slime.converters", name=name, options=options).resolve(Registry())


def run(name, source, target, **options):
    events = []
    done = convert(part(name, **options), source, target, workers=1, report=lambda *news: events.append(news))
    assert events[-1] == ("comparing", events[-1][2], events[-1][2])
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
def test_there_by_the_command_and_back(make_project, model, tmp_path):
    """The way back by the command: test_whole_run.py."""
    project = make_project(tmp_path / "project")
    done = project.slime("convert", str(model), "there", "--to", "torch_dist", "--workers", "1")
    assert done.returncode == 0, done.stderr
    assert "read back and equal" in done.stdout
    run("hf", project.folder / "there", project.folder / "back")
    assert_equal(project.folder / "back", model)
    config = json.loads((tmp_path / "project/back/config.json").read_text())
    assert config == json.loads((model / "config.json").read_text())
    for words, expected in {
        ("convert", "base", "x", "--to", "torch_dits"): "close match: torch_dist",
        ("convert", "base", "x", "--to", "hf", "--hf-checkpiont", "y"): "close match: --hf-checkpoint",
        (
            "convert",
            "base",
            "x",
            "--to",
            "hf",
            "--format",
            "y",
        ): "unknown flag. `slime plugins show hf` lists every key",
    }.items():
        done = project.slime(*words)
        assert done.returncode != 0
        assert "Traceback" not in done.stderr
        assert expected in done.stderr


def test_what_cannot_be_converted_is_an_error(model, torch_dist, tmp_path):
    with pytest.raises(ModelError, match="exists already"):
        run("hf", torch_dist, model)
    with pytest.raises(CheckpointError, match="no torch_dist checkpoint there"):
        run("hf", model, tmp_path / "out")


@pytest.mark.parametrize("name", ["self_attn.k_proj", "mlp.up_proj", "input_layernorm"])
def test_weights_of_another_shape_are_named(model, name, tmp_path):
    folder = shutil.copytree(model, tmp_path / "model")
    (file,) = folder.glob("*.safetensors")
    tensors = load_file(file)
    name = f"model.layers.1.{name}.weight"
    shape, tensors[name] = tuple(tensors[name].shape), torch.zeros(3, 3)
    save_file(tensors, file)
    expected = f"{folder}: 1 weights do not have the shapes of its config.json: {name} (is (3, 3), should be {shape})."
    with pytest.raises(ModelError, match=re.escape(expected)):
        run("torch_dist", folder, tmp_path / "out")
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ModelError, match=r"damaged or cut short.*it has 1000 bytes"):
        run("torch_dist", folder, tmp_path / "out")


@pytest.mark.parametrize("family", ["llama3", "qwen2.5-tied", "glm-4", "deepseek-v3", "glm-4.7-flash"])
def test_there_and_back(family, tmp_path):
    folder = make_family(tmp_path / "model", family)
    run("torch_dist", folder, tmp_path / "there")
    run("hf", tmp_path / "there", tmp_path / "back")
    assert_equal(tmp_path / "back", folder)


def test_a_vision_tower_comes_from_the_folder(layouts, tmp_path):
    _, _, sources = layouts
    folder, torch_dist = sources[LINEAR]
    with pytest.raises(ModelError, match=r"the decoder alone of a model with a vision tower.*--hf-checkpoint"):
        run("hf", torch_dist, tmp_path / "back")
    run("hf", torch_dist, tmp_path / "back", hf_checkpoint=str(folder))
    assert any(name.startswith(TOWER) for name in weights_of(folder))
    assert_equal(tmp_path / "back", folder)


LAYOUTS = {
    "tp2-sp": (FAMILY, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
    "pp2": (FAMILY, {"pipeline_model_parallel_size": 2}),
    "experts, ep2": (EXPERTS, {"expert_model_parallel_size": 2}),
    "linear, tp2-sp": (LINEAR, {"tensor_model_parallel_size": 2, "sequence_parallel": True}),
}


@pytest.fixture(scope="module")
def layouts(torch_dist, model, tmp_path_factory):
    """Each layout loads the checkpoint into its own parts of the model, and saves it again as in training."""
    from conftest import run_layouts

    kept = tmp_path_factory.mktemp("kept")
    sources = {FAMILY: (model, torch_dist)}
    for family in (EXPERTS, LINEAR):
        folder = make_family(tmp_path_factory.mktemp(family) / "model", family)
        run("torch_dist", folder, folder.with_name("torch_dist"))
        sources[family] = folder, folder.with_name("torch_dist")
    others = {family: make_family(tmp_path_factory.mktemp("other") / family, family, seed=8) for family in sources}
    cases = {}
    for name, (family, options) in LAYOUTS.items():
        folders = {"convert": str(sources[family][1]), "save": str(kept / name)}
        cases[name] = {"model": str(others[family]), "world_size": 2, "options": options, **folders}
    # Megatron's format in which equal layers are separate tensors.
    apart = {"options": {"hetereogenous_dist_checkpoint": True}, "save": str(kept / "apart")}
    cases["apart"] = {"model": str(model), "world_size": 1, **apart}
    return run_layouts(tmp_path_factory.mktemp("layouts"), cases), kept, sources


@pytest.mark.parametrize("layout", [*LAYOUTS, "apart"])
def test_every_layout_loads_it_and_saves_it_unchanged(layouts, layout, tmp_path):
    ranks, kept, sources = layouts
    model, _ = sources[LAYOUTS[layout][0] if layout in LAYOUTS else FAMILY]
    (first, *_) = ranks.ranks(layout)
    expected = weights_of(model)
    towers = {name: tensor for name, tensor in expected.items() if name.startswith(TOWER)}
    assert bool(towers) == (layout == "linear, tp2-sp")
    assert all(torch.equal(first["before"][name], expected[name]) for name in expected.keys() - towers.keys())
    with pytest.raises(ModelError, match="--hf-checkpoint"):
        run("hf", kept / layout, tmp_path / "back")
    run("hf", kept / layout, tmp_path / "back", hf_checkpoint=str(model))
    got = weights_of(tmp_path / "back")
    assert got.keys() == expected.keys()
    # One step of descent was made before it was saved.
    assert all(torch.equal(got[name], tensor) for name, tensor in (first["after"] | towers).items())


@pytest.mark.parametrize(
    ("family", "changed", "expected"),
    [
        ("qwen2.5", {}, r"2 tensors: decoder.layers.self_attention.k_layernorm.weight, "),
        (FAMILY, {"num_hidden_layers": 2}, r"input_layernorm.weight is \(4, 32\) there and \(2, 32\) in the model"),
        (FAMILY, {"vocab_size": 24}, r"its vocabulary is 25 there and 24 in that config"),
        (EXPERTS, {}, r"of the model's tensors are missing: decoder.layers.0.input_layernorm.weight, "),
    ],
)
def test_a_config_of_another_model_is_an_error_before_anything_is_written(layouts, family, changed, expected, tmp_path):
    _, kept, _ = layouts
    other = make_family(tmp_path / "other", family)
    config = json.loads((other / "config.json").read_text())
    config.pop("layer_types", None)
    (other / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(CheckpointError, match=expected):
        run("hf", kept / "tp2-sp", tmp_path / "back", hf_checkpoint=str(other))
    assert not list(tmp_path.glob("back*"))


def test_a_killed_conversion_continues(model, tmp_path, monkeypatch):
    from slime_megatron.conversion import ToTorchDist

    target = tmp_path / "out"

    def killed(*args):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(ToTorchDist, "finish", killed)
        with pytest.raises(KeyboardInterrupt):
            run("torch_dist", model, target)
    work = tmp_path / "out.converting"
    journal = work / "journal.jsonl"
    lines = journal.read_text().splitlines(keepends=True)
    assert len(lines) == 6
    # The last line but one is complete, the last one was being written.
    journal.write_text("".join(lines[:4]) + lines[4][:20])
    done = run("torch_dist", model, target)
    assert (done.num_resumed, done.num_pieces) == (3, 5)
    assert not work.exists()


def test_data_lost_on_disk_is_detected(model, tmp_path, monkeypatch):
    from slime_megatron.conversion import ToTorchDist

    finish = ToTorchDist.finish

    def damaged(self, source, folders, target):
        finish(self, source, folders, target)
        largest = max(FileSystemReader(target).read_metadata().storage_data.values(), key=lambda part: part.length)
        file = target / largest.relative_path
        content = bytearray(file.read_bytes())
        # Inside a tensor, behind the header of its archive.
        content[largest.offset + largest.length // 2] ^= 1
        file.write_bytes(content)

    monkeypatch.setattr(ToTorchDist, "finish", damaged)
    with pytest.raises((ModelError, CheckpointError), match=r"read back|is missing"):
        run("torch_dist", model, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_another_source_does_not_continue_with_it(model, tmp_path):
    other = make_family(tmp_path / "other", FAMILY, seed=8)
    shutil.copytree(model, tmp_path / "model")
    work = tmp_path / "out.converting"
    work.mkdir()
    done = {"piece": "outer", "checksums": {}}
    (work / "journal.jsonl").write_text(f"{json.dumps({'source': 'elsewhere'})}\n{json.dumps(done)}\n")
    with pytest.raises(ModelError, match="unfinished conversion with other"):
        run("torch_dist", other, tmp_path / "out")
