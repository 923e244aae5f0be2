"""The hooks that a server reports are those that SGLang's registry has applied."""

import contextlib
import importlib.util
import sys
import threading
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch
from engine_setup import setup_for

from slime_core.cli.main import main
from slime_sglang.launching import hooks_for, options_for
from slime_sglang.plugin import Sglang
from slime_sglang.server import hooks
from slime_sglang.server.hook_table import FOLDERS, HOOKS, in_source
from slime_sglang.server.loading import CAN_VERIFY

pytestmark = pytest.mark.sglang


@pytest.fixture
def updater(monkeypatch):
    """A class for SGLang's registry to hook in the place of its WeightUpdater."""
    module = ModuleType("pretended")
    around = {target.rpartition(".")[2]: hooks.AROUND[target] for target in FOLDERS.targets}
    module.Updater = type("Updater", (), {name: lambda self, *args: "loaded unchecked" for name in around})
    monkeypatch.setitem(sys.modules, "pretended", module)
    monkeypatch.setattr(hooks, "AROUND", {f"pretended.Updater.{name}": hook for name, hook in around.items()})
    monkeypatch.setattr(hooks, "FOLDERS", replace(FOLDERS, targets=tuple(hooks.AROUND)))
    return module.Updater


def apply():
    # A module on its own: SGLang is not imported beside others' tests.
    (folder,) = importlib.util.find_spec("sglang").submodule_search_locations
    spec = importlib.util.spec_from_file_location("registry", Path(folder, "srt/plugins/hook_registry.py"))
    registry = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(registry)
    HookRegistry, HookType = registry.HookRegistry, registry.HookType
    for target, hook in hooks.AROUND.items():
        HookRegistry.register(target, hook, HookType.AROUND)
    # Hooks of other plugins, around ours or inside.
    HookRegistry.register("pretended.Updater.update_weights_from_disk", lambda *args: None, HookType.BEFORE)
    HookRegistry.apply_hooks()


def test_a_server_verifies_if_its_loading_is_hooked(updater):
    with pytest.raises(NotImplementedError, match=r"pretended\.Updater\.update_weights_from_disk is not hooked"):
        hooks.check_weights(None, None, CAN_VERIFY)
    apply()
    assert hooks.check_weights(None, None, CAN_VERIFY) is None


def test_a_hook_that_could_not_be_put_in_is_missed(updater):
    """SGLang logs it and continues."""
    del updater.update_weights_from_disk
    apply()
    assert updater.update_weights_from_tensor.__wrapped__
    with pytest.raises(NotImplementedError, match="update_weights_from_disk"):
        hooks.check_weights(None, None, CAN_VERIFY)


def test_every_target_exists_and_has_a_wrapper():
    targets = [target for hook in HOOKS for target in hook.targets]
    assert sorted(targets) == sorted(hooks.AROUND)
    assert [target for target in targets if not in_source(target)] == []
    assert not in_source("sglang.srt.layers.sampler.murmur_hash")
    assert not in_source("sglang.srt.nowhere.murmur_hash32")
    assert not in_source("nowhere.at_all")


@pytest.mark.parametrize(
    ("settings", "config", "names"),
    [
        ({}, {}, ["one-address", "checks", "heads", "draws", "cpu-seeds"]),
        ({"transport": "disk"}, {"deterministic": False}, ["one-address", "checks", "folders", "heads"]),
        (
            {"transport": "ipc", "routed_experts": True},
            {"deterministic": False},
            ["one-address", "checks", "heads", "cpu-experts"],
        ),
        (
            {"device": "cuda", "transport": "delta", "routed_experts": True},
            {},
            ["one-address", "checks", "folders", "heads"],
        ),
        ({"device": "cuda"}, {"deterministic": True}, ["one-address", "checks", "heads", "draws"]),
        ({"reward_model": True}, {}, ["one-address", "heads", "cpu-seeds"]),
        ({"reward_model": True, "device": "cuda"}, {}, ["one-address", "heads"]),
    ],
)
def test_a_server_has_the_hooks_that_its_run_needs(settings, config, names, tmp_path):
    setup = setup_for(tmp_path, tmp_path, **settings)
    assert hooks_for(setup, options_for(Sglang.Config(**config), setup, 0)) == names


def test_the_listing_has_each_hook_and_its_purpose(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["slime", "plugins", "show", "sglang"])
    monkeypatch.setenv("COLUMNS", "400")
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code in (0, None)
    lines = capsys.readouterr().out.splitlines()
    for hook in HOOKS:
        for target in hook.targets:
            (line,) = [line for line in lines if target in line]
            assert hook.purpose in line
            assert hook.when in line
            assert line.rstrip().endswith("yes")


def test_a_server_that_was_begun_early_waits_before_it_uses_devices(monkeypatch, tmp_path):
    gate, connected = tmp_path / "open", []
    monkeypatch.setattr(hooks, "on_one_address", lambda method: method)
    monkeypatch.setattr(sys, "argv", ["launch", "one-address", f"gate={gate}"])

    def connects(*args):
        connected.append(gate.exists())

    thread = threading.Thread(target=hooks.meet_on_one_address, args=(connects, 1, 0, "tcp://127.0.0.1:1"))
    thread.start()
    thread.join(0.3)
    assert not connected
    gate.touch()
    thread.join(10)
    assert connected == [True]


class Headed(torch.nn.Module):
    """A model of SGLang with a head of its own."""

    def __init__(self, tied):
        super().__init__()
        self.config = SimpleNamespace(tie_word_embeddings=tied)
        self.embed_tokens, self.lm_head = torch.nn.Embedding(5, 3), torch.nn.Linear(3, 5, bias=False)


def copies_the_embedding(model, weights):
    model.lm_head.weight.data.copy_(dict(weights)["embed_tokens.weight"])


def loads_both(model, weights):
    for name, weight in weights:
        model.get_parameter(name).data.copy_(weight)


def test_a_head_of_numbers_that_are_none_is_compared_too():
    model = Headed(True)
    nothing = torch.full_like(model.embed_tokens.weight, torch.nan)
    model.embed_tokens.weight.data.copy_(nothing)
    hooks.load_heads(copies_the_embedding, model, iter([("embed_tokens.weight", nothing)]))


@pytest.mark.parametrize(
    ("tied", "names", "load", "refused"),
    [
        (True, ["embed_tokens.weight"], lambda model, weights: list(weights), True),
        (True, ["embed_tokens.weight"], copies_the_embedding, False),
        # Trainers would send no head later.
        (True, ["embed_tokens.weight", "lm_head.weight"], loads_both, True),
        (False, ["embed_tokens.weight", "lm_head.weight"], loads_both, False),
        (False, ["embed_tokens.weight"], lambda model, weights: list(weights), False),
    ],
    ids=["never-loaded", "copied", "in-the-files", "not-tied-in-the-files", "not-tied"],
)
def test_a_head_that_is_never_loaded_ends_the_server(tied, names, load, refused):
    model = Headed(tied)
    weights = [(name, model.embed_tokens.weight.detach().clone()) for name in names]
    with (
        pytest.raises(RuntimeError, match=r"tie_word_embeddings = false and its own lm_head\.weight")
        if refused
        else contextlib.nullcontext()
    ):
        hooks.load_heads(load, model, iter(weights))


@pytest.mark.parametrize(("packed", "own"), [("lm_head", False), ("embed_tokens", True)])
def test_a_head_that_is_packed_for_amx_is_no_other_head(packed, own):
    model = Headed(True)
    model.get_submodule(packed).use_intel_amx_backend = True
    assert hooks.has_own_head(model) is own
