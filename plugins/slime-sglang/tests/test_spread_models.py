"""The check of pushed weights on SGLang's own models, as each rank of a server builds and loads them. Nothing wrong is found in
what was loaded; and one changed element of any parameter of any rank is found, by the name that files have for it."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from slime_plugin_kit.tiny_model import checksum_of

pytestmark = pytest.mark.sglang

LAYOUTS = {
    "dense": 2, "biases": 2, "replicated": 2, "four": 4, "padded": 2, "experts-cut": 2, "experts-spread": 2, "experts-moved": 2,
    "experts-padded": 2, "mixtral": 2, "latent": 2, "latent-fused": 2, "latent-whole": 1, "latent-padded": 2,
    "latent-without-q": 2, "attention-whole": 2,
}  # fmt: skip
"""Ranks of each."""


@pytest.fixture(scope="module")
def results(tmp_path_factory):
    """The folder of each script and what it printed; both run at the same time, on a core each."""
    environment = os.environ | {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1", "TORCHDYNAMO_DISABLE": "1"}
    folders = {name: tmp_path_factory.mktemp(name) for name in ("spread_models", "quantised_models")}
    with contextlib.ExitStack() as stack:
        running = {}
        for name, folder in folders.items():
            command = [sys.executable, Path(__file__).with_name(f"{name}.py"), folder]
            pipe = subprocess.PIPE
            process = subprocess.Popen(command, env=environment, stdout=pipe, stderr=pipe, text=True)
            running[name] = stack.enter_context(process)
            stack.callback(process.kill)
        found = {}
        for name, process in running.items():
            out, err = process.communicate(timeout=400)
            assert process.returncode == 0, err[-4000:]
            lines = (json.loads(line) for line in out.splitlines() if line.startswith("{"))
            found[name] = folders[name], {response["layout"]: response for response in lines}
        yield found


@pytest.fixture(scope="module")
def played(results):
    assert list(results["spread_models"][1]) == list(LAYOUTS)
    return results["spread_models"]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_one_changed_element_of_a_rank_is_found(played, layout):
    response = played[1][layout]
    assert response["differences"] == []
    assert len(response["changed"]) > 80
    for change, found in response["changed"].items():
        rank, name, _ = change.split(" ", 2)
        (named,) = found
        # Norms and gates are called as in files; what is stacked is at least in the same module.
        assert named.startswith(name.rpartition(".")[0].rpartition(".")[0]) or ".shared_experts." in named, change
        assert LAYOUTS[layout] == 1 or named.endswith(f" of rank {rank}"), change


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_delta_updates_what_changed(played, layout):
    """Also of one of two matrices that are stacked, and to what is made of a matrix after it was loaded."""
    assert played[1][layout]["delta"] == []


def test_a_parameter_with_its_own_loader_is_refused(played):
    """How it is sharded is not known. A rank alone has all of everything."""
    refused = {layout: response["refused"] for layout, response in played[1].items()}
    assert refused.pop("latent-whole") is None
    assert all("how the loader of model.norm.weight shards it is not known" in given for given in refused.values())


def test_the_checksum_of_latent_attention_is_that_of_its_files(played):
    folder, responses = played
    tensors = load_file(folder / "latent-whole" / "model.safetensors")
    # This one SGLang keeps in float32, as DeepSeek's files do.
    tensors = {name: tensor.float() if "correction_bias" in name else tensor for name, tensor in tensors.items()}
    assert responses["latent-whole"]["whole"] == checksum_of(tensors)


def test_an_update_in_float8_gives_the_weights_of_the_converted_folder(results):
    """Stacked matrices, experts on two ranks and latent attention; the second load of each model."""
    _, responses = results["quantised_models"]
    assert list(responses) == ["dense", "experts-spread", "latent"]
    for layout, response in responses.items():
        assert response["wrong"] == [], layout
        # Two ranks and two layers.
        assert response["float8"] >= 16, layout
