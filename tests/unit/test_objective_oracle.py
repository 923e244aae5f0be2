"""Credit and objective of every recipe against a loop over tokens in float64 that shares no code with them."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from slime_core.algorithm.advantages import compute_advantages_and_returns
from slime_core.algorithm.loss import TokenObjective
from slime_core.algorithm.loss_weights import split_steps
from slime_core.algorithm.packing import pack_micro_batch
from slime_core.contracts.correction import LossCorrection, OffPolicyCorrection
from slime_core.contracts.kl import KlEstimator
from slime_core.contracts.loss import LossOutput, PolicyLoss
from slime_core.contracts.needs import Need
from slime_core.controller.learner import advantage_config
from slime_core.errors import TrainingError
from slime_core.types.batch import TokenColumns
from slime_core.workers.agreement import Agreement
from slime_core.workers.objective import ObjectiveSpec
from slime_training.segments import LocalSegments

MAX_LEN = 16
# Two prompts with four rollouts each. Sample 1 and 2 are one rollout; 4 is empty; 6 fully masked; the tool wrote zeros.
LENGTHS = [(3, 5), (2, 3), (4, 2), (1, 7), (6, 0), (2, 4), (3, 3), (1, 1), (2, 6)]
GROUP = [0, 0, 0, 0, 0, 1, 1, 1, 1]
ROLLOUT = [0, 1, 1, 2, 3, 4, 5, 6, 7]
REWARD = [1.0, 0.0, 0.5, 1.0, 0.0, 2.0, -1.0, 0.5, 0.25]
MASKS = [[1] * 5, [1, 0, 1], [1, 1], [1, 1, 0, 0, 0, 1, 1], [], [1] * 4, [0] * 3, [1], [1, 1, 1, 1, 1, 0]]

# Bounds of the ratio (of the weight for cispo), whether of the sequence, std, aggregation; and how far off-policy the
# data is, so that some tokens clip and some do not.
RECIPES = {
    "grpo": {"low": 0.8, "high": 1.2, "std": True, "mode": "seq_mean", "gap": 0.3},
    "dr_grpo": {"low": 0.8, "high": 1.2, "std": False, "mode": "constant", "gap": 0.3},
    "dapo": {"low": 0.8, "high": 1.28, "std": True, "mode": "token_mean", "gap": 0.3},
    "gspo": {"low": 1 - 3e-4, "high": 1 + 4e-4, "std": True, "mode": "seq_mean", "gap": 1e-3, "sequence": True},
    "cispo": {"low": 0.0, "high": 5.0, "std": True, "mode": "seq_mean", "gap": 2.0, "cispo": True},
}
FLAGS = ("--rollout-batch-size", "2", "--n-samples-per-prompt", "4", "--global-batch-size", "8")
KL = {
    "k1": lambda d, ratio: ratio * d,
    "k2": lambda d, ratio: ratio * d**2 / 2,
    "k3": lambda d, ratio: ratio * (torch.exp(-d) - 1 + d),
    "low_var_kl": lambda d, ratio: torch.clamp(ratio * (torch.exp(-d) - 1 + d), -10, 10),
}


# --- The oracle -------------------------------------------------------------------------------------------------------


def oracle_credit(std):
    """One number per sample; inside a group every rollout counts once."""
    credit = []
    for sample, reward in enumerate(REWARD):
        values = [
            np.mean([REWARD[s] for s in range(len(REWARD)) if ROLLOUT[s] == rollout])
            for rollout in sorted({ROLLOUT[s] for s in range(len(REWARD)) if GROUP[s] == GROUP[sample]})
        ]
        centred = reward - np.mean(values)
        credit.append(centred / (np.std(values, ddof=1) + 1e-6) if std else centred)
    return credit


def oracle(recipe, data, *, entropy_coef=0.0, kl_coef=0.0, kl=None, unbiased=False):
    """Loss, its gradients and the metrics, token by token."""
    low, high = recipe["low"], recipe["high"]
    log_probs, entropy = (torch.tensor(data[name], dtype=torch.float64, requires_grad=True) for name in ("l", "h"))
    old, ref = (torch.tensor(data[name], dtype=torch.float64) for name in ("old", "ref"))
    starts = np.cumsum([0, *(r for _, r in LENGTHS)])
    trainable = [sum(mask) for mask in MASKS]
    num_rollouts = len(set(ROLLOUT))
    credit = oracle_credit(recipe["std"])
    sums = dict.fromkeys(("pg_loss", "entropy_loss", "kl_loss", "pg_clipfrac", "ppo_kl"), torch.zeros(()).double())
    for sample, mask in enumerate(MASKS):
        weight = {
            "seq_mean": 1
            / max(sum(trainable[s] for s in range(len(MASKS)) if ROLLOUT[s] == ROLLOUT[sample]), 1)
            / num_rollouts,
            "token_mean": 1 / sum(trainable),
            "constant": 1 / MAX_LEN / num_rollouts,
        }[recipe["mode"]]
        tokens = [starts[sample] + t for t, bit in enumerate(mask) if bit]
        advantage = credit[sample]
        gaps = [log_probs[t] - old[t] for t in tokens]
        mean_gap = sum(gaps) / max(len(gaps), 1)
        for t, gap in zip(tokens, gaps, strict=True):
            ratio = torch.exp(mean_gap if recipe.get("sequence") else gap)
            clipped = torch.clamp(ratio, low, high)
            if recipe.get("cispo"):
                value = -clipped.detach() * advantage * log_probs[t]
                stopped = bool(clipped != ratio)
            else:
                value = torch.maximum(-ratio * advantage, -clipped * advantage)
                stopped = bool(-clipped * advantage > -ratio * advantage)
            sums["pg_loss"] = sums["pg_loss"] + weight * value
            sums["pg_clipfrac"] = sums["pg_clipfrac"] + weight * stopped
            sums["ppo_kl"] = sums["ppo_kl"] - weight * (mean_gap if recipe.get("sequence") else gap)
            sums["entropy_loss"] = sums["entropy_loss"] + weight * entropy[t]
            if kl is not None:
                of_ratio = torch.exp(gap) if unbiased else 1.0
                sums["kl_loss"] = sums["kl_loss"] + weight * KL[kl](log_probs[t] - ref[t], of_ratio)
    loss = sums["pg_loss"] - entropy_coef * sums["entropy_loss"] + kl_coef * sums["kl_loss"]
    loss.backward()
    entropy_grad = torch.zeros_like(entropy) if entropy.grad is None else entropy.grad
    metrics = {name: float(value.detach()) for name, value in sums.items()} | {"loss": float(loss.detach())}
    return metrics, log_probs.grad.numpy(), entropy_grad.numpy()


# --- The code under test ----------------------------------------------------------------------------------------------


@pytest.fixture
def batch(make_batch):
    return make_batch(LENGTHS, group=GROUP, rollout_id=ROLLOUT, reward=REWARD, masks=MASKS)


def make_data(gap, *, garbage=False):
    """float32 numbers, held in float64, so that both sides start from the same. `garbage` at masked tokens."""
    rng = np.random.default_rng(5)
    flat = np.array([bit for mask in MASKS for bit in mask], bool)
    old = rng.normal(-2, 0.7, len(flat))
    data = {
        "l": old + gap * rng.normal(size=len(flat)),
        "old": old,
        "ref": old + 0.4 * rng.normal(size=len(flat)),
        "h": rng.uniform(0, 3, len(flat)),
    }
    data = {name: values.astype(np.float32).astype(np.float64) for name, values in data.items()}
    if garbage:
        data["l"][~flat], data["old"][~flat], data["ref"][~flat], data["h"][~flat] = np.nan, -np.inf, np.nan, np.inf
    return data


def build(run, **changes):
    spec = ObjectiveSpec.of(run.roles[0])
    spec = replace(spec, **{"old_from_current": False, **changes})
    return spec.build(Agreement.of(run.parts, run.registry.plugin_files), run.registry)


def columns_of(data):
    return TokenColumns(old_log_probs=data["old"].astype(np.float32), ref_log_probs=data["ref"].astype(np.float32))


def run_micros(objective, batch, columns, data, micros, dtype=torch.float64):
    """Sums and gradients of these micro-batches, added up as ranks and micro-batches do."""
    log_probs, entropy = (torch.tensor(data[name], dtype=dtype, requires_grad=True) for name in ("l", "h"))
    sums = {}
    for samples in micros:
        samples = np.array(samples, np.int64)
        micro = pack_micro_batch(batch, samples, columns=columns)
        rows = torch.from_numpy(batch.response_rows(samples))
        output = objective(
            micro,
            segments=LocalSegments(micro.segments, micro.num_samples),
            log_probs=log_probs[rows],
            entropy=entropy[rows] if objective.needs_entropy else None,
        )
        output.loss.backward()
        for name, value in output.sums.items():
            assert not value.requires_grad
            sums[name] = sums.get(name, 0.0) + float(value)
    gradients = [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in (log_probs, entropy)]
    return sums, gradients[0].numpy(), gradients[1].numpy()


def credited(run, batch, data):
    return compute_advantages_and_returns(batch, columns_of(data), advantage_config(run, run.algo)).columns


def same(one, other, tolerance=1e-6):
    np.testing.assert_allclose(one, other, rtol=tolerance, atol=tolerance * np.abs(other).max(initial=1e-30))


WHOLE = [list(range(len(LENGTHS)))]
SPLITS = {
    "whole": WHOLE,
    "three uneven": [[0, 1, 2, 3, 4], [5], [6, 7, 8]],
    "one sample each": [[n] for n in range(len(LENGTHS))],
    "rollout torn apart": [[1, 8, 4], [2, 0], [], [7, 6, 5, 3]],
    "reversed": [list(range(len(LENGTHS)))[::-1]],
    "nothing to train": [[4], [6], [0, 1, 2, 3, 5, 7, 8]],
}


@pytest.mark.parametrize("algo", RECIPES)
@pytest.mark.parametrize("split", SPLITS)
def test_every_recipe_against_the_oracle_for_every_split(bound, batch, algo, split):
    recipe = RECIPES[algo]
    data = make_data(recipe["gap"])
    run = bound("--algo", algo, *FLAGS, "--entropy-coef", "0.01", "--kl-loss-coef", "0.05")
    expected, grad, entropy_grad = oracle(recipe, data, entropy_coef=0.01, kl_coef=0.05, kl="k3")
    sums, got, got_entropy = run_micros(build(run), batch, credited(run, batch, data), data, SPLITS[split])
    for name, value in expected.items():
        assert sums[name] == pytest.approx(value, rel=1e-6, abs=1e-9), name
    same(got, grad)
    same(got_entropy, entropy_grad)
    # The data would be a poor test if nothing were clipped, or everything.
    assert 0 < expected["pg_clipfrac"] < 0.95
    assert np.count_nonzero(grad) > 5


@pytest.mark.parametrize("algo", RECIPES)
def test_two_data_parallel_shards_add_up_to_one(bound, batch, algo):
    data = make_data(RECIPES[algo]["gap"])
    run = bound("--algo", algo, *FLAGS)
    objective, columns = build(run), credited(run, batch, data)
    whole, grad, _ = run_micros(objective, batch, columns, data, WHOLE)
    sums, total = {}, np.zeros_like(grad)
    for chosen, micros in (([8, 1, 3, 6], [[0, 2], [1], [3]]), ([0, 2, 4, 5, 7], [[1, 0], [4, 3, 2], []])):
        rows = batch.response_rows(np.array(chosen))
        part = {name: values[rows] for name, values in data.items()}
        of_shard, shard_grad, _ = run_micros(objective, batch.take(np.array(chosen)), columns.take(rows), part, micros)
        total[rows] += shard_grad
        for name, value in of_shard.items():
            sums[name] = sums.get(name, 0.0) + value
    assert sums == pytest.approx(whole, rel=1e-6, abs=1e-9)
    same(total, grad)


def test_the_order_of_samples_does_not_matter(bound, make_batch):
    """Credit included: groups are formed by key."""
    order = [8, 2, 4, 0, 6, 3, 1, 7, 5]
    data = make_data(0.3)
    run = bound("--algo", "grpo", *FLAGS)
    batch = make_batch(LENGTHS, group=GROUP, rollout_id=ROLLOUT, reward=REWARD, masks=MASKS)
    rows = batch.response_rows(np.array(order))
    shuffled = {name: values[rows] for name, values in data.items()}
    other = batch.take(np.array(order))
    _, grad, _ = run_micros(build(run), batch, credited(run, batch, data), data, WHOLE)
    _, moved, _ = run_micros(
        build(run), other, credited(run, other, shuffled), shuffled, [[3, 1], [0, 2, 4, 5, 6, 7, 8]]
    )
    same(moved, grad[rows])


def test_float32_agrees_to_its_own_precision(bound, batch):
    data = make_data(0.3)
    run = bound("--algo", "grpo", *FLAGS)
    expected, grad, _ = oracle(RECIPES["grpo"], data)
    sums, got, _ = run_micros(build(run), batch, credited(run, batch, data), data, WHOLE, torch.float32)
    assert sums["loss"] == pytest.approx(expected["loss"], abs=1e-6)
    same(got, grad, 1e-5)


@pytest.mark.parametrize("unbiased", [False, True])
@pytest.mark.parametrize("kl", KL)
def test_kl_loss_with_every_estimator(bound, batch, kl, unbiased):
    data = make_data(0.3)
    data["ref"][2] += 4.0  # k3 of this token is beyond the clamp of low_var_kl
    data["ref"] = data["ref"].astype(np.float32).astype(np.float64)
    flags = ["--algo", "grpo", *FLAGS, "--kl-loss-coef", "0.3", "--kl-loss-type", kl]
    run = bound(*flags, *(["--use-unbiased-kl"] if unbiased else []))
    expected, grad, _ = oracle(RECIPES["grpo"], data, kl_coef=0.3, kl=kl, unbiased=unbiased)
    sums, got, _ = run_micros(build(run), batch, credited(run, batch, data), data, SPLITS["three uneven"])
    assert sums["kl_loss"] == pytest.approx(expected["kl_loss"], rel=1e-6)
    assert sums["loss"] == pytest.approx(expected["loss"], rel=1e-6)
    same(got, grad)


def test_the_reported_sums_add_up_to_the_loss(bound, batch):
    data = make_data(0.3)
    run = bound("--algo", "grpo", *FLAGS, "--entropy-coef", "0.02", "--kl-loss-coef", "0.1")
    sums, _, _ = run_micros(build(run), batch, credited(run, batch, data), data, SPLITS["three uneven"])
    total = sums["pg_loss"] - 0.02 * sums["entropy_loss"] + 0.1 * sums["kl_loss"]
    assert sums["loss"] == pytest.approx(total, rel=1e-9)
    assert min(abs(sums[name]) for name in ("pg_loss", "entropy_loss", "kl_loss")) > 1e-3


def test_entropy_without_a_coefficient_is_reported_and_has_no_gradient(bound, batch):
    data = make_data(0.3)
    run = bound("--algo", "grpo", *FLAGS)
    objective = build(run)
    assert objective.needs_entropy
    assert not objective.entropy_has_gradient
    sums, _, entropy_grad = run_micros(objective, batch, credited(run, batch, data), data, WHOLE)
    assert sums["entropy_loss"] == pytest.approx(oracle(RECIPES["grpo"], data)[0]["entropy_loss"], rel=1e-6)
    assert not entropy_grad.any()


@pytest.mark.parametrize("algo", RECIPES)
def test_garbage_at_masked_tokens_reaches_nothing(bound, batch, algo):
    clean, dirty = make_data(RECIPES[algo]["gap"]), make_data(RECIPES[algo]["gap"], garbage=True)
    run = bound("--algo", algo, *FLAGS, "--kl-loss-coef", "0.1", "--use-unbiased-kl", "--entropy-coef", "0.01")
    objective = build(run)
    expected = run_micros(objective, batch, credited(run, batch, clean), clean, WHOLE)
    got = run_micros(objective, batch, credited(run, batch, dirty), dirty, WHOLE)
    assert got[0] == pytest.approx(expected[0])
    same(got[1], expected[1], 1e-12)
    assert np.isfinite(got[1]).all()
    assert np.isfinite(got[2]).all()


@pytest.mark.parametrize("algo", ["grpo", "dr_grpo", "dapo", "cispo"])
def test_old_log_probs_from_the_current_ones_equal_the_explicit_column(bound, batch, algo):
    data = make_data(0.3)
    data["old"] = data["l"]
    run = bound("--algo", algo, *FLAGS, "--kl-loss-coef", "0.1", "--use-unbiased-kl")
    assert ObjectiveSpec.of(run.roles[0]).old_from_current
    explicit = run_micros(build(run), batch, credited(run, batch, data), data, WHOLE)
    columns = replace(credited(run, batch, data), old_log_probs=None)
    current = run_micros(build(run, old_from_current=True), batch, columns, data, WHOLE)
    assert current[0] == pytest.approx(explicit[0], rel=1e-7)
    same(current[1], explicit[1], 1e-12)
    assert current[0]["ppo_kl"] == 0


def test_old_log_probs_that_are_given_are_used(bound, batch):
    """Also where the current ones would be the old ones: in a loop of one's own they may be from before."""
    data = make_data(0.3)
    run = bound("--algo", "grpo", *FLAGS)
    columns = credited(run, batch, data)
    given = run_micros(build(run, old_from_current=True), batch, columns, data, WHOLE)
    expected = run_micros(build(run), batch, columns, data, WHOLE)
    assert given[0] == expected[0]
    same(given[1], expected[1], 0)
    assert given[0]["ppo_kl"] != 0


@pytest.mark.parametrize(
    "flags",
    [
        ("--algo", "gspo"),
        ("--algo", "grpo", "--use-rollout-logprobs"),
        ("--algo", "grpo", "--get-mismatch-metrics"),
        ("--algo", "grpo", "--global-batch-size", "4"),
    ],
)
def test_old_log_probs_are_scored_where_the_current_ones_might_differ(bound, flags):
    run = bound(*FLAGS, *flags)
    assert not ObjectiveSpec.of(run.roles[0]).old_from_current


# --- Numbers by hand --------------------------------------------------------------------------------------------------


def test_grpo_by_hand(bound, make_batch):
    """Rewards 0 and 1, responses of two tokens and of one. Credit -+0.5 / (sqrt(1/2) + 1e-6)."""
    credit = 0.5 / (math.sqrt(0.5) + 1e-6)
    assert credit == pytest.approx(0.7071058)
    batch = make_batch([(1, 2), (1, 1)], group=[0, 0], reward=[0.0, 1.0])
    run = bound("--rollout-batch-size", "1", "--n-samples-per-prompt", "2", "--global-batch-size", "2")
    # Ratios 1 and 1/2 with a negative advantage: the second is clipped at 0.8. Ratio 1.5 with a positive one: at 1.2.
    old = np.array([-1.0, -1.0, -2.0])
    data = {"old": old, "ref": old, "l": old + np.log([1.0, 0.5, 1.5]), "h": np.array([1.0, 2.0, 3.0])}
    sums, grad, _ = run_micros(build(run), batch, credited(run, batch, data), data, [[0, 1]])
    assert sums["pg_loss"] == pytest.approx(0.7071058 * ((1.0 + 0.8) / 2 - 1.2) / 2, rel=1e-6)
    assert sums["pg_loss"] == pytest.approx(-0.1060659, rel=1e-6)
    assert grad.tolist() == pytest.approx([0.7071058 / 4, 0, 0], rel=1e-6)
    assert sums["pg_clipfrac"] == pytest.approx((0.5 + 1) / 2)
    assert sums["ppo_kl"] == pytest.approx((-math.log(0.5) / 2 - math.log(1.5)) / 2)
    assert sums["entropy_loss"] == pytest.approx((1.5 + 3) / 2)


def test_train_rollout_gap_by_hand(bound, make_batch):
    batch = make_batch([(1, 2), (1, 1)], group=[0, 0], reward=[0.0, 1.0], masks=[[1, 0], [1]])
    run = bound("--rollout-batch-size", "1", "--n-samples-per-prompt", "2", "--global-batch-size", "2")
    old = batch.rollout_log_probs.astype(np.float64) + np.array([0.25, 100.0, -0.75])
    data = {"old": old, "ref": old, "l": old, "h": np.zeros(3)}
    sums, _, _ = run_micros(build(run), batch, credited(run, batch, data), data, [[0, 1]])
    assert sums["train_rollout_logprob_abs_diff"] == pytest.approx(0.5, rel=1e-5)


# --- What the objective refuses ---------------------------------------------------------------------------------------


class Reads(PolicyLoss):
    """Records the inputs that it gets."""

    def __init__(self):
        self.seen = {}

    def __call__(self, inputs, segments):
        self.seen = {name: getattr(inputs, name) is not None for name in inputs.__dataclass_fields__}
        given = inputs.values if inputs.log_probs is None else inputs.log_probs
        return LossOutput(values=given * 1.0)


class WrongWeights(OffPolicyCorrection):
    """0.5 at trained tokens, NaN elsewhere."""

    def correct_loss(self, inputs, segments):
        assert inputs.rollout_log_probs is None
        return LossCorrection(weights=torch.where(inputs.mask, 0.5, float("nan")), metrics={"kept": inputs.mask * 1.0})


def one_micro(make_batch, **columns):
    batch = make_batch([(1, 2), (2, 1)], masks=[[1, 0], [1]])
    every = dict.fromkeys(("old_log_probs", "ref_log_probs", "values", "advantages", "teacher_log_probs"))
    given = {name: np.ones(3, np.float32) for name in every}
    return pack_micro_batch(batch, np.array([0, 1]), columns=TokenColumns(**(given | columns)))


def call(objective, micro, **tensors):
    tensors = tensors or {"log_probs": torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)}
    return objective(micro, segments=LocalSegments(micro.segments, micro.num_samples), **tensors)


WEIGHT = np.array([0.5, 0.0, 0.25], np.float32)


@pytest.mark.parametrize("needs", [frozenset(), frozenset({Need.OLD_LOGPROBS}), frozenset({Need.REF_LOGPROBS})])
def test_only_declared_needs_are_given(make_batch, needs):
    loss = Reads()
    call(TokenObjective(loss=loss, needs=needs), one_micro(make_batch, loss_weight=WEIGHT))
    optional = {"old_log_probs", "ref_log_probs", "old_values", "rollout_log_probs", "teacher_log_probs", "entropy"}
    assert {name for name in optional if loss.seen[name]} == {need.value for need in needs}
    assert loss.seen["log_probs"]
    assert loss.seen["advantages"]


def test_a_loss_that_reads_what_it_did_not_declare_fails(make_batch):
    class Sneaky(PolicyLoss):
        def __call__(self, inputs, segments):
            return LossOutput(values=inputs.log_probs - inputs.ref_log_probs)

    with pytest.raises(TrainingError, match="policy loss Sneaky, loss of a micro-batch: raised TypeError"):
        call(TokenObjective(loss=Sneaky(), needs=frozenset()), one_micro(make_batch, loss_weight=WEIGHT))


def test_a_critics_loss_reads_values_and_reports_value_loss(make_batch):
    loss = Reads()
    objective = TokenObjective(loss=loss, needs=frozenset({Need.VALUES}), reads_values=True)
    assert not objective.needs_entropy
    values = torch.tensor([1.0, 2.0, 4.0], requires_grad=True)
    output = call(objective, one_micro(make_batch, loss_weight=WEIGHT), values=values)
    assert loss.seen["values"]
    assert loss.seen["old_values"]
    assert not loss.seen["log_probs"]
    assert float(output.sums["value_loss"]) == 0.5 * 1 + 0.25 * 4
    assert "pg_loss" not in output.sums


def test_what_a_loss_returns_at_masked_tokens_is_not_read(make_batch):
    log_probs = torch.tensor([-1.0, math.nan, -3.0], requires_grad=True)
    micro = one_micro(make_batch, loss_weight=WEIGHT)
    output = call(TokenObjective(loss=Reads(), needs=frozenset()), micro, log_probs=log_probs)
    output.loss.backward()
    assert float(output.loss.detach()) == 0.5 * -1 + 0.25 * -3
    assert log_probs.grad.tolist() == [0.5, 0, 0.25]
    assert float(output.sums["pg_loss"]) == -1.25


def test_corrections_multiply_and_leave_the_denominator_alone(make_batch):
    objective = TokenObjective(
        loss=Reads(), needs=frozenset(), corrections=[(WrongWeights(), frozenset()), (WrongWeights(), frozenset())]
    )
    column = np.array([3.0, np.nan, 0.0], np.float32)
    micro = one_micro(make_batch, loss_weight=WEIGHT, correction=column)
    log_probs = torch.tensor([-1.0, -2.0, -3.0], requires_grad=True)
    output = call(objective, micro, log_probs=log_probs)
    assert float(output.loss.detach()) == 0.5 * 3.0 * 0.25 * -1.0
    output.loss.backward()
    assert log_probs.grad.tolist() == [0.5 * 3.0 * 0.25, 0, 0]
    assert float(output.sums["kept"]) == 0.75


def test_a_micro_batch_without_loss_weights_is_refused(make_batch):
    with pytest.raises(ValueError, match="loss_weight"):
        call(TokenObjective(loss=Reads(), needs=frozenset()), one_micro(make_batch))


class Gap(KlEstimator):
    def __call__(self, log_probs, ref_log_probs, ratio=None):
        return log_probs - ref_log_probs


def test_a_kl_term_without_its_columns_is_refused(make_batch):
    objective = TokenObjective(loss=Reads(), needs=frozenset(), kl=Gap(), use_unbiased_kl=True)
    with pytest.raises(ValueError, match="ref_log_probs"):
        call(objective, one_micro(make_batch, loss_weight=WEIGHT, ref_log_probs=None))
    with pytest.raises(ValueError, match="old_log_probs"):
        call(objective, one_micro(make_batch, loss_weight=WEIGHT, old_log_probs=None))


def test_an_empty_micro_batch_gives_a_zero_with_a_graph(make_batch):
    batch = make_batch([(1, 2)])
    columns = TokenColumns(loss_weight=np.ones(2, np.float32), advantages=np.ones(2, np.float32))
    micro = pack_micro_batch(batch, np.empty(0, np.int64), columns=columns)
    hidden = torch.ones(4, requires_grad=True)
    output = call(TokenObjective(loss=Reads(), needs=frozenset()), micro, log_probs=hidden[:0] * 2)
    output.loss.backward()
    assert float(output.loss.detach()) == 0
    assert hidden.grad.tolist() == [0, 0, 0, 0]


def test_two_optimizer_steps_have_their_own_denominators(bound, batch):
    """Every step's loss is what a batch of its own would give, apart from credit, which is of the whole batch."""
    data = make_data(0.3)
    run = bound("--algo", "grpo", *FLAGS[:-1], "4")
    columns = credited(run, batch, data)
    steps = split_steps(batch, 4)
    assert steps.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1]
    sums, _, _ = run_micros(build(run), batch, columns, data, [np.flatnonzero(steps == 1)])
    trainable = [4, 0, 1, 5]
    credit = oracle_credit(True)
    expected = 0.0
    starts = np.cumsum([0, *(r for _, r in LENGTHS)])
    for sample, count in zip([5, 6, 7, 8], trainable, strict=True):
        for t, bit in enumerate(MASKS[sample]):
            if bit:
                row = starts[sample] + t
                ratio = math.exp(data["l"][row] - data["old"][row])
                clipped = min(max(ratio, 0.8), 1.2)
                expected += max(-ratio * credit[sample], -clipped * credit[sample]) / count / 4
    assert sums["pg_loss"] == pytest.approx(expected, rel=1e-6)
