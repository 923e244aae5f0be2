"""The table of trained roles from a run file, and every problem that is reported about it."""

import json
import re
from dataclasses import asdict, replace

import pytest

from slime_core.config.checks import cross_checks
from slime_core.config.run import RoleConfig
from slime_core.config.train import OptimizerOverrides
from slime_core.contracts.needs import Need
from slime_core.contracts.optimizer import OptimizerConfig
from slime_core.controller.manifest import build_manifest
from slime_core.controller.run_changes import ChangeKind, changes_since
from slime_core.controller.run_inputs import load_role_config
from slime_core.errors import ConfigError, ModelError
from slime_core.workers.objective import ObjectiveSpec
from slime_core.workers.role_specs import RoleSpecs
from slime_core.workers.roles import sharing_devices

VALUED = """
from slime_core.config.train import OptimizerConfig
from slime_core.contracts.backend import BackendDriver, Layout
from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.needs import Need
from slime_core.plugin import driver, loss


class ValuedConfig(DriverConfig):
    parts: int = 1
    \"\"\"Ranks that it needs.\"\"\"
    only: int = 32
    \"\"\"The vocabulary that it takes.\"\"\"


@driver("slime.backends", "valued")
class Valued(BackendDriver):
    Config = ValuedConfig
    provides = BackendDriver.provides | {Need.VALUES}

    @classmethod
    def build(cls, config):
        raise AssertionError("nothing is built while binding")

    @classmethod
    def min_world_size(cls, config):
        return config.parts

    @classmethod
    def layout(cls, config, rank, world_size):
        return Layout()

    @classmethod
    def problems(cls, config, world_size, model_config):
        fits = model_config["vocab_size"] == config.only
        return [] if fits else [f"{world_size} ranks: vocabulary {model_config['vocab_size']}"]


@loss("mine", needs={Need.VALUES, Need.OLD_LOGPROBS}, trains_values=True)
def mine(inputs, segments):
    raise AssertionError
"""
LION = """
from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.optimizer import OptimizerDriver
from slime_core.plugin import driver


class LionConfig(DriverConfig):
    lion_momentum: float = 0.95
    \"\"\"Decay of the momentum.\"\"\"


@driver("slime.optimizers", "lion")
class Lion(OptimizerDriver):
    Config = LionConfig

    @classmethod
    def build(cls, config):
        raise AssertionError("nothing is built while binding")
"""
PPO = ("--algo", "ppo", "--backend", "valued")


@pytest.fixture
def ppo(bound, tmp_path):
    """Binds with a backend that provides values, and an algorithm that requires them."""
    (tmp_path / "valued.py").write_text(VALUED)
    plugins = ("--plugin", str(tmp_path / "fakes.py"), str(tmp_path / "valued.py"))
    return lambda *flags, **how: bound(*plugins, *PPO, *flags, **how)


@pytest.fixture
def complaints(ppo):
    def problems_of(*flags, **how):
        with pytest.raises(ConfigError) as caught:
            ppo(*flags, **how)
        return caught.value.problems

    return problems_of


def only(problems, pattern):
    assert len(problems) == 1, problems
    assert re.search(pattern, problems[0]), problems[0]


# --- The table --------------------------------------------------------------------------------------------------------


def test_without_a_critic_the_policy_is_alone(bound):
    (actor,) = bound("--kl-loss-coef", "0.1", "--lr", "1e-4").roles
    assert (actor.name, actor.head, actor.loss.name, actor.num_ranks) == ("actor", "lm", "clip", 1)
    assert [(s.column, s.output, s.weights) for s in actor.plan.scoring] == [
        ("ref_log_probs", "log_probs", "reference")
    ]
    assert set(actor.frozen_models) == set(actor.plan.updated_frozen_models) == {"reference"}
    assert actor.optimizer.lr == 1e-4
    assert actor.plan.metric_prefix == ""


def test_a_critic_is_a_second_row(ppo, tmp_path):
    run = ppo("--lr", "1e-4", "--value-clip", "0.3", "--lambd", "0.9", "--eps-clip-c", "3")
    actor, critic = run.roles
    assert (critic.name, critic.head, critic.loss.name) == ("critic", "value", "value")
    assert critic.loss.config.value_clip == 0.3
    assert run.algo.advantage.config.lambd == 0.9
    assert actor.loss.config.eps_clip_c == 3
    assert critic.backend == run.backend
    assert critic.model_path == actor.model_path == tmp_path / "base"
    assert critic.optimizer == actor.optimizer
    assert (critic.plan.idle_steps, actor.plan.idle_steps) == (0, 0)
    (values,) = critic.plan.scoring
    assert (values.column, values.output, values.by_others) == (Need.VALUES, "values", True)
    # With a critic the old log-probs have a forward of their own, for the policy's loss alone.
    (old,) = actor.plan.scoring
    assert (old.column, old.by_others) == (Need.OLD_LOGPROBS, False)
    assert critic.plan.columns == {"advantages", "returns", "loss_weight", "values"}
    assert "values" not in actor.plan.columns
    assert (critic.needs, Need.VALUES in actor.needs) == ({Need.VALUES}, False)


def test_only_the_policys_ranks_send_weights(ppo, tmp_path):
    run = ppo()
    specs = RoleSpecs(run=run, agreement=None, device="cpu", run_dir=tmp_path, num_rollout=1)
    sent = {role.name: [spec.transport for spec in specs.of_role(role)] for role in run.roles}
    assert sent == {"actor": [run.transport.spec()], "critic": [None]}


def test_the_critics_objective_is_its_loss_alone(ppo):
    actor, critic = (ObjectiveSpec.of(role) for role in ppo("--entropy-coef", "0.1", "--kl-loss-coef", "0.2").roles)
    assert (actor.entropy_coef, actor.kl_loss_coef, actor.kl.name) == (0.1, 0.2, "slime-estimators/k3")
    assert critic == ObjectiveSpec(
        loss=critic.loss, kl=None, kl_loss_coef=0.0, use_unbiased_kl=False, entropy_coef=0.0, corrections=(),
        old_from_current=False, old_from_rollout=False,
    )  # fmt: skip


def test_the_kl_in_the_reward_is_scored_for_everyone(ppo):
    run = ppo("--kl-coef", "0.1", "--num-critic-only-steps", "2")
    actor, _ = run.roles
    assert {s.column: s.by_others for s in actor.plan.scoring} == {"old_log_probs": True, "ref_log_probs": True}
    assert actor.plan.idle_steps == 2
    assert run.algo.kl_reward.name == "k1"


def test_columns_that_a_critics_loss_reads_are_scored_for_it(ppo):
    actor, critic = ppo("--critic-loss", "mine").roles
    assert critic.loss.name == "mine"
    assert {s.column: s.by_others for s in actor.plan.scoring} == {"old_log_probs": True}
    assert {"old_log_probs", "values"} <= critic.plan.columns


def test_a_critic_of_its_own_kind(ppo, tmp_path):
    (tmp_path / "critic").mkdir()
    (tmp_path / "critic" / "config.json").write_text(json.dumps({"vocab_size": 48}))
    run = ppo(
        "--critic-lr", "1e-5", "--critic-lr-warmup-iters", "3", "--critic-load", str(tmp_path / "critic"),
        "--critic-backend", "valued", "--critic-only", "48", "--lr", "1e-4", "--clip-grad", "0.5",
    )  # fmt: skip
    actor, critic = run.roles
    assert (critic.optimizer.lr, actor.optimizer.lr) == (1e-5, 1e-4)
    assert (critic.optimizer.lr_warmup_iters, critic.optimizer.clip_grad) == (3, 0.5)
    assert critic.model_path == tmp_path / "critic"
    assert (critic.backend.config.only, actor.backend.config.only) == (48, 32)
    assert critic.backend in run.parts
    same = ppo(
        extra=f"[roles.critic]\nlr = 1e-5\nlr_warmup_iters = 3\nload = '{tmp_path}/critic'\n"
        "backend = { name = 'valued', only = 48 }\n[train]\nlr = 1e-4\nclip_grad = 0.5\nnum_rollout = 3\n",
        text=RUN_WITHOUT_TRAIN,
    )
    assert same.roles[1].optimizer == critic.optimizer
    assert same.roles[1].backend.config == critic.backend.config


RUN_WITHOUT_TRAIN = """
name = "tiny"
model = { hf_checkpoint = "base" }
plugin = ["fakes.py"]
data = { prompt_data = ["train.jsonl"], input_key = "prompt", label_key = "label" }
backend = "fake"
engine = "fake"
reward = "one"
algo = "grpo"
rollout = { rollout_batch_size = 4, n_samples_per_prompt = 8, rollout_max_response_len = 16 }
"""


def test_every_optimizer_key_can_be_a_roles_own():
    assert set(OptimizerOverrides.model_fields) == set(OptimizerConfig.model_fields)
    train = OptimizerConfig(lr=1e-3, weight_decay=0.5)
    assert RoleConfig().optimizer_config(train) == train
    assert RoleConfig(weight_decay=0.0).optimizer_config(train) == train.model_copy(update={"weight_decay": 0.0})


def test_a_roles_own_warm_up_replaces_the_other_form_of_it():
    share, steps = OptimizerConfig(lr_warmup_fraction=0.1), OptimizerConfig(lr_warmup_iters=4)
    assert RoleConfig(lr_warmup_iters=3).optimizer_config(share).warmup_and_decay(80) == (3, 80)
    assert RoleConfig(lr_warmup_fraction=0.5).optimizer_config(steps).warmup_and_decay(80) == (40, 80)
    assert RoleConfig(lr=1.0).optimizer_config(share).warmup_and_decay(80) == (8, 80)


def test_a_warm_up_has_one_length(ppo):
    with pytest.raises(ConfigError, match=r"train: lr_warmup_iters and lr_warmup_fraction are both.*Leave one"):
        ppo("--lr-warmup-iters", "3", "--lr-warmup-fraction", "0.1")
    with pytest.raises(ConfigError, match=r"roles\.critic: lr_warmup_iters and"):
        ppo("--critic-lr-warmup-iters", "3", "--critic-lr-warmup-fraction", "0.1")
    ppo("--lr-warmup-iters", "3", "--critic-lr-warmup-fraction", "0.1")


def test_a_critic_may_have_an_optimizer_of_its_own(ppo, tmp_path):
    (tmp_path / "lion.py").write_text(LION)
    words = ("--plugin", *(str(tmp_path / f"{name}.py") for name in ("fakes", "valued", "lion")))
    run = ppo(*words, "--critic-optimizer", "lion", "--critic-lion-momentum", "0.7")
    assert [role.optimizer.optimizer for role in run.roles] == ["adam", "lion"]
    assert run.roles[1].chosen_optimizer.options.lion_momentum == 0.7
    written = build_manifest(run, data_fingerprint="d").config
    assert written["train"]["optimizer"] == "adam"
    assert written["roles"]["critic"]["optimizer"] == {"name": "lion", "lion_momentum": 0.7}


def test_places(ppo):
    ray = ("--launcher", "ray", "--actor-num-gpus-per-node", "4", "--actor-num-nodes", "2")
    shared = ppo(*ray)
    assert [role.num_ranks for role in shared.roles] == [8, 8]
    assert [[role.name for role in roles] for roles in sharing_devices(shared.roles)] == [["actor", "critic"]]
    own = ppo(*ray, "--critic-num-nodes", "2", "--critic-num-gpus-per-node", "3")
    assert [(role.num_ranks, role.ranks_per_node) for role in own.roles] == [(8, 4), (6, 3)]
    assert [[role.name for role in roles] for roles in sharing_devices(own.roles)] == [["actor"], ["critic"]]
    (least,) = (role for role in ppo(*ray, "--critic-num-nodes", "1").roles if role.name == "critic")
    assert least.num_ranks == 1


def test_roles_are_part_of_the_runs_identity(ppo):
    def fingerprint(*flags):
        return build_manifest(ppo(*flags), data_fingerprint="d").fingerprint

    changes = [(), ("--critic-lr", "0.1"), ("--value-clip", "0.3"), ("--num-critic-only-steps", "1")]
    changes += [("--gamma", "0.9"), ("--critic-load", "elsewhere"), ("--critic-backend", "valued")]
    assert len({fingerprint(*flags) for flags in changes}) == len(changes)


def test_layouts_make_other_runs_that_train_the_same(ppo):
    def manifest(*flags):
        return build_manifest(ppo("--critic-backend", "valued", *flags), data_fingerprint="d")

    def kinds(one, other):
        return {change.kind for change in changes_since(asdict(one), other)}

    one, moved = manifest(), manifest("--launcher", "ray", "--actor-num-gpus-per-node", "4", "--name", "other")
    assert kinds(one, moved) == {ChangeKind.LAYOUT, ChangeKind.TUNING}
    assert kinds(one, manifest("--lr", "0.5", "--critic-lr", "0.25", "--clip-grad", "2")) == {ChangeKind.TUNING}
    assert kinds(one, manifest("--gamma", "0.5")) == {ChangeKind.CONFIG}


def test_the_resolved_config_is_a_run_file_of_the_same_run(ppo):
    import tomlkit

    from slime_core.controller.startup import drop_none

    run = ppo("--critic-backend", "valued", "--critic-lr", "1e-5", "--value-clip", "0.4", "--gamma", "0.9")
    manifest = build_manifest(run, data_fingerprint="d")
    again = ppo(text=tomlkit.dumps(drop_none(manifest.config)))
    assert again.roles[1].loss.config.value_clip == 0.4
    assert build_manifest(again, data_fingerprint="d").fingerprint == manifest.fingerprint


# --- Complaints -------------------------------------------------------------------------------------------------------


def test_a_backend_without_values(bound, complaints):
    with pytest.raises(ConfigError) as caught:
        bound("--algo", "ppo")
    only(
        caught.value.problems,
        r'^backend\.name = "fake": the critic of algorithm "ppo" needs values, which this backend does not provide\. '
        r"It provides entropy, old_log_probs, ref_log_probs",
    )
    only(complaints("--critic-backend", "fake"), r'^roles\.critic\.backend\.name = "fake": the critic .* needs values')


def test_a_recipe_with_a_missing_part(ppo, bound):
    run = ppo()
    without = replace(run, algo=replace(run.algo, critic_loss=None))
    assert re.search(
        r'^algo\.critic_loss: algorithm "ppo" trains a critic, but names no loss for it: a recipe with a missing part\. '
        r"Pass --critic-loss NAME\.",
        cross_checks(without)[0],
    )
    judged = replace(run, algo=replace(run.algo, recipe=replace(run.algo.recipe, roles=("critic", "critique"))))
    only(cross_checks(judged), r'role = "critique": unknown trained role; close match: critic\. Available: critic\.')


def test_a_critics_loss_without_a_critic(complaints):
    problems = complaints("--algo", "grpo", "--critic-loss", "value")
    assert re.search(r'^algo\.critic_loss = "value": algorithm "grpo" has no role critic', problems[0])


def test_settings_of_a_critic_that_is_not_there(complaints):
    problems = complaints(
        "--algo", "grpo", "--critic-lr", "0.1", "--num-critic-only-steps", "2", "--launcher", "ray",
        "--critic-num-gpus-per-node", "2",
    )  # fmt: skip
    assert len(problems) == 3
    assert problems[0] == 'roles.critic: algorithm "grpo" trains no critic. Leave the table out.'
    assert problems[1].startswith('launcher.critic_num_gpus_per_node = 2: algorithm "grpo" trains no critic')
    assert problems[2].startswith('algo.num_critic_only_steps = 2: algorithm "grpo" trains no critic')


def test_swapped_losses_are_refused(complaints):
    only(complaints("--critic-loss", "clip"), r'loss "clip" trains log-probs and does not fit the critic')
    only(complaints("--loss", "value"), r'loss "value" trains values and does not fit the actor')


def test_an_advantage_that_needs_values_without_a_critic(complaints):
    only(
        complaints("--algo", "grpo", "--advantage", "gae"), "its parts need values, but it has no role that learns them"
    )


def test_one_process_has_no_devices_to_give_away(complaints):
    only(complaints("--critic-num-nodes", "1"), r"^launcher\.critic_num_nodes = 1: .* Pass --launcher ray")


def test_each_backend_checks_the_model_of_its_role(complaints, tmp_path):
    (tmp_path / "critic").mkdir()
    (tmp_path / "critic" / "config.json").write_text(json.dumps({"vocab_size": 48}))
    only(complaints("--critic-load", str(tmp_path / "critic")), "1 ranks: vocabulary 48")
    (tmp_path / "base" / "config.json").write_text(json.dumps({"vocab_size": 40}))
    # Both roles have this problem, and it is reported once.
    only(complaints(), "1 ranks: vocabulary 40")


def test_unknown_names_and_options_of_a_role(complaints):
    problems = complaints("--set", "roles.critc.lr=1", "--set", "roles.critic.lrr=1")
    assert re.search(r"^roles\.critic\.lrr: unknown option; close match: lr", problems[0])
    assert re.search(r"^roles\.critc: unknown option; close match: critic", problems[1])
    only(complaints("--critic-backend", "valuedd"), r'^roles\.critic\.backend\.name = "valuedd": unknown')


def test_a_critic_with_another_vocabulary(ppo, tmp_path):
    (tmp_path / "base" / "pytorch_model.bin").touch()
    _, critic = ppo().roles
    assert load_role_config(critic, 32)["vocab_size"] == 32
    with pytest.raises(ModelError, match=r"the critic's model has 32 tokens, the run's tokenizer 33"):
        load_role_config(critic, 33)
