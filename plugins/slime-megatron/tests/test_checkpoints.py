"""A run resumed in another layout continues like one that kept its layout."""

import json
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from families import make_family
from safetensors.torch import load_file

from slime_core.algorithm.loss import TokenObjective
from slime_core.errors import CheckpointError
from slime_megatron.plugin import Megatron
from slime_plugin_kit.objectives import EVERY_NEED
from slime_plugin_kit.tiny_training import ADAM, SGD, Place, SquaredError, TrainingBatch, objective_of, opened

pytestmark = pytest.mark.megatron

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
DISTRIBUTED = {"use_distributed_optimizer": True}
LOOP = {"moe_grouped_gemm": False}
"""Megatron's experts, one after the other: a run with them resumes with grouped ones, and the reverse."""
MOMENTS = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
WEIGHTS = MOMENTS | {"bf16": True, "main_params_dtype": "bf16"}
FLOAT32 = 1e-4
"""Tolerance of a weight after a step of Adam, whose direction rounding can reverse where a gradient is close to zero."""


@pytest.fixture(scope="module")
def layouts(tmp_path_factory):
    from conftest import run_layouts

    folder = make_family(tmp_path_factory.mktemp("model") / "qwen3-moe", "qwen3-moe")
    kept = tmp_path_factory.mktemp("checkpoints")

    def case(world_size, options, **more):
        return {"model": str(folder), "world_size": world_size, "options": options, "adam": True} | more

    cases = {
        "one": case(1, {}, save=str(kept / "one")),
        "tp2-sp": case(2, TP2, save=str(kept / "tp2-sp")),
        "dp2-distributed": case(2, DISTRIBUTED | LOOP, save=str(kept / "dp2")),
        "one to tp2-sp": case(2, TP2, load=str(kept / "one")),
        "one to pp2": case(2, PP2, load=str(kept / "one")),
        "one to dp2-ep2": case(2, EP2, load=str(kept / "one")),
        "tp2-sp to one": case(1, {}, load=str(kept / "tp2-sp")),
        "dp2-distributed to grouped experts": case(2, DISTRIBUTED, load=str(kept / "dp2")),
        "dp2-distributed to one": case(1, DISTRIBUTED, load=str(kept / "dp2")),
        "dp2-distributed to ep2": case(2, EP2 | DISTRIBUTED, load=str(kept / "dp2")),
        "one to ep2 distributed": case(2, EP2 | DISTRIBUTED | LOOP, load=str(kept / "one")),
        "ep2-distributed": case(2, EP2 | DISTRIBUTED, save=str(kept / "ep2")),
        "ep2-distributed to one plain": case(1, {}, load=str(kept / "ep2")),
        "moments": case(2, DISTRIBUTED | MOMENTS, save=str(kept / "moments")),
        "moments to itself": case(2, DISTRIBUTED | MOMENTS, load=str(kept / "moments")),
        "moments to tp2-sp": case(2, TP2 | MOMENTS, load=str(kept / "moments")),
        "weights": case(2, TP2 | WEIGHTS, save=str(kept / "weights")),
        "weights to itself": case(2, TP2 | WEIGHTS, load=str(kept / "weights")),
    }
    return run_layouts(tmp_path_factory.mktemp("layouts"), cases)


@pytest.mark.parametrize("other", ["tp2-sp", "dp2-distributed"])
def test_adam_steps_are_those_of_one_rank(layouts, other):
    (one, *_), (got, *_) = layouts.ranks("one"), layouts.ranks(other)
    for name, tensor in one["after"].items():
        assert float((got["after"][name] - tensor).abs().max()) <= FLOAT32, name


@pytest.mark.bits
@pytest.mark.parametrize("case", ["one", "tp2-sp", "dp2-distributed", "moments", "weights"])
def test_a_checkpoint_written_during_a_step_equals_a_direct_one(layouts, case):
    """Except `.metadata`, in which torch gives each save a number and stores its folder."""
    layouts.ranks(case)
    folder = Path(layouts.cases[case]["save"])
    saved, staged = (
        {file.relative_to(at): file for file in at.rglob("*") if file.is_file()}
        for at in (folder, Path(f"{folder}-staged"))
    )
    assert saved.keys() == staged.keys()
    assert len(saved) > 4
    for name, file in saved.items():
        if file.suffix == ".safetensors":
            assert_same_tensors(load_file(file), load_file(staged[name]))
        elif name.name == "megatron.json":
            one, other = json.loads(file.read_text()), json.loads(staged[name].read_text())
            assert one["sizes"].pop("state/.metadata") > 0 < other["sizes"].pop("state/.metadata")
            assert one == other
        elif name.name != ".metadata":
            assert file.read_bytes() == staged[name].read_bytes(), name


def assert_same_tensors(one, other):
    assert one.keys() == other.keys()
    assert all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def test_moments_in_bfloat16_are_near(layouts):
    """Close, and yet rounded: a whole step is 1e-2, and rounding changes it by a hundredth."""
    (one, *_), (got, *_) = layouts.ranks("one"), layouts.ranks("moments")
    apart = max(float((got["after"][name] - tensor).abs().max()) for name, tensor in one["after"].items())
    assert 1e-6 < apart < 5e-4


@pytest.mark.bits
@pytest.mark.parametrize("kept", ["moments", "weights"])
def test_bfloat16_state_resumes_to_the_bit(layouts, kept):
    (expected, *_), (got, *_) = layouts.ranks(kept), layouts.ranks(f"{kept} to itself")
    assert all(torch.equal(got["after"][name], tensor) for name, tensor in expected["next"].items())


@pytest.mark.parametrize(
    "move",
    [
        "one to tp2-sp",
        "one to pp2",
        "one to dp2-ep2",
        "tp2-sp to one",
        "dp2-distributed to grouped experts",
        "dp2-distributed to one",
        "dp2-distributed to ep2",
        "one to ep2 distributed",
        "ep2-distributed to one plain",
        "moments to tp2-sp",
    ],
)
def test_it_continues_in_another_layout(layouts, move):
    """Two steps, saved, loaded elsewhere after two steps there, and one more."""
    (expected, *_), (got, *_) = layouts.ranks(move.split(" to ")[0]), layouts.ranks(move)
    moved = max(float((expected["next"][name] - tensor).abs().max()) for name, tensor in expected["after"].items())
    assert moved > 10 * FLOAT32
    for name, tensor in expected["next"].items():
        apart = float((got["after"][name] - tensor).abs().max())
        assert apart <= FLOAT32, f"{name} is off by {apart:.3g}"


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_family(tmp_path_factory.mktemp("model") / "qwen3", "qwen3")


@pytest.fixture
def saved(folder, tmp_path):
    with opened(Megatron.build(Megatron.Config()), Place(model=folder), optimizer=ADAM) as one:
        one.backend.save(tmp_path)
    return tmp_path


def test_ranks_that_have_written_wait_for_one_that_writes_for_hours(folder, monkeypatch, tmp_path):
    """A thread that writes beside training uses a group of its own."""
    from slime_megatron import checkpoint

    groups, save, raise_on_all_ranks = [], dcp.save, checkpoint.raise_on_all_ranks

    def note_save(*given, process_group, **kwargs):
        groups.append(process_group)
        return save(*given, process_group=process_group, **kwargs)

    def note_rest(work, group, world_size):
        groups.append(group)
        raise_on_all_ranks(work, group, world_size)

    monkeypatch.setattr(dcp, "save", note_save)
    monkeypatch.setattr(checkpoint, "raise_on_all_ranks", note_rest)
    with opened(Megatron.build(Megatron.Config()), Place(model=folder), optimizer=ADAM) as one:
        for name in ("at_once", "later"):
            (tmp_path / name).mkdir()
        one.backend.save(tmp_path / "at_once")
        assert len(groups) == 3
        one.backend.stage(tmp_path / "later")()
        assert [id(group) for group in groups] == [id(groups[0])] * 3 + [id(groups[3])] * 3
        assert groups[0] is not groups[3]
        for group in groups:
            assert group._get_backend(torch.device("cpu")).options._timeout >= timedelta(hours=12)


def test_saved_before_the_first_step(folder, saved):
    training = TrainingBatch.make()

    def weights(load):
        with opened(Megatron.build(Megatron.Config()), Place(model=folder), optimizer=ADAM) as one:
            if load:
                one.backend.train_step(training.micros(), objective_of())
                one.backend.load(saved)
            for _ in range(2):
                one.backend.train_step(training.micros(), objective_of())
            return one.weights()

    straight, resumed = weights(False), weights(True)
    assert all(torch.equal(resumed[name], tensor) for name, tensor in straight.items())


class GroupAdam(torch.optim.Optimizer):
    """Counts steps like the FusedAdam of Transformer Engine and Apex: in each group that has parameters, from 1 if there is no
    count."""

    def __init__(self, params, *, lr, weight_decay, betas, eps, adam_w_mode):
        assert adam_w_mode
        super().__init__(params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps})

    @torch.no_grad()
    def step(self):
        for group in filter(lambda group: group["params"], self.param_groups):
            count = group["step"] = group["step"] + 1 if "step" in group else 1
            beta1, beta2 = group["betas"]
            for weight in (weight for weight in group["params"] if weight.grad is not None):
                state = self.state[weight]
                if not state:
                    state["exp_avg"], state["exp_avg_sq"] = torch.zeros_like(weight), torch.zeros_like(weight)
                mean = state["exp_avg"].lerp_(weight.grad, 1 - beta1)
                square = state["exp_avg_sq"].mul_(beta2).addcmul_(weight.grad, weight.grad, value=1 - beta2)
                root = (square / (1 - beta2**count)).sqrt() + group["eps"]
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                weight.addcdiv_(mean / (1 - beta1**count), root, value=-group["lr"])


@pytest.mark.parametrize("options", [{}, {"bf16": True}, DISTRIBUTED], ids=["plain", "bf16", "distributed"])
@pytest.mark.parametrize("steps", [0, 2])
def test_an_adam_that_counts_by_group_continues(folder, monkeypatch, tmp_path, options, steps):
    """Also in a run that has taken steps of its own before."""
    from megatron.core import optimizer
    from megatron.core.optimizer import distrib_optimizer

    from slime_megatron.optimizer import parts_of

    for module in (optimizer, distrib_optimizer):
        monkeypatch.setattr(module, "Adam", GroupAdam)
    monkeypatch.setattr(optimizer, "USING_PYTORCH_OPTIMIZER", False)
    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)
    monkeypatch.setattr(distrib_optimizer, "USING_TE_OPTIMIZER", True)
    training = TrainingBatch.make()

    def begun():
        return opened(Megatron.build(Megatron.Config(**options)), Place(model=folder), optimizer=ADAM)

    def step(one, count):
        for _ in range(count):
            one.backend.train_step(training.micros(), objective_of())
        inner = [part.optimizer for part in parts_of(one.backend._trainer.optimizer)]
        assert {type(adam) for adam in inner} == {GroupAdam}
        return {group["step"] for adam in inner for group in adam.param_groups if group["params"]}

    with begun() as one:
        step(one, steps) if steps else None
        one.backend.save(tmp_path)
        assert step(one, 2) == {steps + 2}
        straight = one.weights()
    for before in (0, 3):
        with begun() as one:
            step(one, before) if before else None
            one.backend.load(tmp_path)
            assert step(one, 2) == {steps + 2}
            assert all(torch.equal(tensor, straight[name]) for name, tensor in one.weights().items())


@pytest.mark.bits
def test_a_critic_continues(folder, tmp_path):
    training = TrainingBatch.make()
    objective = TokenObjective(loss=SquaredError(), needs=EVERY_NEED, reads_values=True)

    def opened_critic():
        return opened(Megatron.build(Megatron.Config()), Place(model=folder), optimizer=ADAM, head="value")

    with opened_critic() as one:
        one.backend.train_step(training.micros(), objective)
        one.backend.save(tmp_path)
        one.backend.train_step(training.micros(), objective)
        straight = one.weights()
    with opened_critic() as one:
        one.backend.load(tmp_path)
        one.backend.train_step(training.micros(), objective)
        resumed = one.weights()
    assert {"score.weight", "score.bias"} <= set(resumed)
    assert all(torch.equal(resumed[name], tensor) for name, tensor in straight.items())


def test_another_architecture_is_an_error(saved, tmp_path):
    other = make_family(tmp_path / "other", "qwen2.5")
    with (
        opened(Megatron.build(Megatron.Config()), Place(model=other), optimizer=ADAM) as one,
        pytest.raises(CheckpointError, match=r"another architecture.*qk_layernorm is True there and None here"),
    ):
        one.backend.load(saved)


def test_another_optimizer_is_an_error(folder, saved):
    with (
        opened(Megatron.build(Megatron.Config()), Place(model=folder), optimizer=SGD) as one,
        pytest.raises(CheckpointError, match="optimizer is adam there and sgd here"),
    ):
        one.backend.load(saved)


@pytest.mark.parametrize(("there", "here", "bf16"), [(None, True, "false"), (True, None, "true")])
@pytest.mark.parametrize(("role", "table"), [("actor", "backend"), ("critic", "roles.critic.backend")])
def test_the_error_for_another_dtype_has_the_flags_to_pass(folder, tmp_path, there, here, bf16, role, table):
    """A run that moves between a CPU and GPUs gets another default dtype. A role may have options of its own."""

    def one(bf16):
        return opened(Megatron.build(Megatron.Config(bf16=bf16)), Place(model=folder), optimizer=ADAM, role=role)

    with one(there) as saved:
        saved.backend.save(tmp_path)
    with (
        one(here) as other,
        pytest.raises(CheckpointError, match=rf"To keep the dtype of the checkpoint, pass .* --{table}\.bf16 {bf16}\."),
    ):
        other.backend.load(tmp_path)
    with one(bf16 == "true") as same:
        same.backend.load(tmp_path)


def test_a_later_format_is_an_error(folder, saved):
    manifest = saved / "megatron.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | {"format": 9}))
    with (
        opened(Megatron.build(Megatron.Config()), Place(model=folder), optimizer=ADAM) as one,
        pytest.raises(CheckpointError, match="format 9; this version reads 1"),
    ):
        one.backend.load(saved)
