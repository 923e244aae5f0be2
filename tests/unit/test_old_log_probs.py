"""Old log-probs scored, skipped because they equal the current ones, or taken from the rollout: the calls of the trainer in
each case, and the results of corrections and mismatch metrics, down to the gradient."""

import contextlib
import math
from dataclasses import replace

import numpy as np
import pytest
import torch

from slime_core.algorithm.packing import pack_micro_batch
from slime_core.controller.learner import Learner, LearnerPlan
from slime_core.errors import TrainingError
from slime_core.types.prompt import Prompt
from slime_core.types.sample import Sample, SampleGroup
from slime_core.workers.agreement import Agreement
from slime_core.workers.objective import ObjectiveSpec
from slime_core.workers.train_group import TrainedSteps
from slime_training.segments import LocalSegments

# Two prompts with two responses each; the third response is empty, the fourth fully masked. Credit is -+ 1/sqrt 2.
MASKS = [[1, 1, 1], [1, 0, 1, 1], [], [0, 0]]
REWARDS = [1.0, 0.0, 1.0, 0.0]
ADVANTAGES = [0.5 / (math.sqrt(0.5) + 1e-6) * sign for sign in (1, -1, 1, -1)]
FLAGS = ("--rollout-batch-size", "2", "--n-samples-per-prompt", "2")
ONE_STEP, TWO_STEPS = (*FLAGS, "--global-batch-size", "4"), (*FLAGS, "--global-batch-size", "2")


def exact(rows):
    return [np.array(row, np.float32).astype(float) for row in rows]


rng = np.random.default_rng(1)
TRAINER = exact([rng.normal(-2, 0.5, len(mask)) for mask in MASKS])
"""Before this rollout's training."""
ENGINE = exact(
    [row + gap for row, gap in zip(TRAINER, ([0.9, -0.3, 0.1], [-1.2, 9, 0.4, 0.2], [], [5, 5]), strict=True)]
)
MOVED = exact([row - 0.02 * (n + 1) for n, row in enumerate(TRAINER)])
"""After the first of two optimizer steps; not far enough to be clipped."""


def make_groups():
    groups = []
    for number in range(2):
        prompt = Prompt(group_index=number, text="q", token_ids=np.array([1], np.int32))
        samples = [
            Sample(
                index=n,
                group_index=number,
                rollout_id=n,
                prompt=prompt,
                tokens=np.arange(1 + len(MASKS[n]), dtype=np.int32),
                prompt_length=1,
                loss_mask=np.array(MASKS[n], np.uint8),
                rollout_log_probs=ENGINE[n].astype(np.float32),
                reward=REWARDS[n],
            )
            for n in (2 * number, 2 * number + 1)
        ]
        groups.append(SampleGroup(prompt=prompt, samples=tuple(samples)))
    return groups


class Trainer:
    """One rank with the run's own objective, in micro-batches of one sample: its log-probs are those above."""

    def __init__(self, run):
        spec = ObjectiveSpec.of(run.roles[0])
        self.objective = spec.build(Agreement.of(run.parts, run.registry.plugin_files), run.registry)
        self.scored = 0
        self.gradients = [np.zeros(len(mask)) for mask in MASKS]

    @contextlib.asynccontextmanager
    async def turn(self):
        yield

    def forward_tflop(self, batch):
        return 0.0

    def dispatch(self, batch, step_of_sample):
        self.step_of_sample = step_of_sample
        return type("Dispatch", (), {"batch": batch})

    async def score(self, dispatch, **how):
        self.scored += 1
        return {"log_probs": np.concatenate(TRAINER).astype(np.float32)}

    async def train(self, dispatch, columns, rollout_id):
        reports = []
        for step in range(int(self.step_of_sample.max()) + 1):
            sums = {}
            for n in np.flatnonzero(self.step_of_sample == step):
                micro = pack_micro_batch(dispatch.batch, np.array([n]), columns=columns)
                leaf = torch.tensor((MOVED if step else TRAINER)[n], requires_grad=True)
                entropy = torch.zeros(len(leaf), dtype=torch.float64)
                segments = LocalSegments(micro.segments, 1)
                output = self.objective(micro, segments=segments, log_probs=leaf, entropy=entropy)
                output.loss.backward()
                self.gradients[n] = leaf.grad.numpy()
                sums = {name: sums.get(name, 0.0) + float(value) for name, value in output.sums.items()}
            reports.append({**sums, "skipped_steps": 0.0, "grad_norm": 1.0})
        return TrainedSteps(metrics=reports, nonfinite=None)


async def train(run, groups=None):
    trainer = Trainer(run)
    learner = Learner({"actor": trainer}, LearnerPlan.of(run), on_batch=lambda *event: None)
    report = await learner.train(0, groups or make_groups(), 3)
    return trainer, report


def expected_gradients(weight, *, num_steps=1, old=TRAINER):
    """seq_mean of -A x rho x weight(sample, token)."""
    gradients = []
    for n, mask in enumerate(MASKS):
        current = MOVED if num_steps == 2 and n >= 2 else TRAINER
        share = 1 / max(sum(mask), 1) / (4 / num_steps)
        gradients.append(
            [
                -ADVANTAGES[n] * bit * share * math.exp(current[n][t] - old[n][t]) * weight(n, t)
                for t, bit in enumerate(mask)
            ]
        )
    return gradients


def same(got, expected):
    for n in range(4):
        np.testing.assert_allclose(got[n], expected[n], rtol=2e-6, atol=1e-12, err_msg=f"sample {n}")


def truncated(n, t):
    return min(math.exp(TRAINER[n][t] - ENGINE[n][t]), 1.3)


@pytest.mark.parametrize("name", ["tis", "mis"])
async def test_scored_for_the_second_optimizer_step(bound, name):
    key = {"tis": "--tis-clip", "mis": "--tis-upper-bound"}[name]
    run = bound(*TWO_STEPS, "--corrections", name, key, "1.3")
    trainer, report = await train(run)
    assert trainer.scored == 1
    same(trainer.gradients, expected_gradients(truncated, num_steps=2))
    assert report.rollout["rollout/log_probs"] == pytest.approx(mean_trained(TRAINER), rel=1e-6)
    assert [step["train/global_batch_size"] for step in report.steps] == [2, 2]


async def test_skipped_where_they_are_the_current_ones(bound):
    """tis then uses the current log-probs, detached; no forward computes them."""
    run = bound(*ONE_STEP, "--corrections", "tis", "--tis-clip", "1.3")
    trainer, report = await train(run)
    assert trainer.scored == 0
    same(trainer.gradients, expected_gradients(truncated))
    (step,) = report.steps
    assert step["train/ois"] == pytest.approx(2 / 4)  # 1 at every trained token of two of four rollouts
    gap = [sum(abs(TRAINER[n] - ENGINE[n])[np.array(MASKS[n], bool)]) / 3 / 4 for n in (0, 1)]
    assert step["train/train_rollout_logprob_abs_diff"] == pytest.approx(sum(gap), rel=1e-6)
    assert not [name for name in step if name.startswith("train/mis")]


@pytest.mark.parametrize(
    "flags", [("--corrections", "mis", "--tis-upper-bound", "1.3"), ("--corrections", "tis", "--tis-clip", "1.3")]
)
async def test_a_correction_of_the_whole_step_and_mismatch_metrics_require_them_scored(bound, flags):
    run = bound(*ONE_STEP, *flags, *(["--get-mismatch-metrics"] if "tis" in flags else []))
    trainer, report = await train(run)
    assert trainer.scored == 1
    same(trainer.gradients, expected_gradients(truncated))
    assert_mismatch(report.steps[0])


def assert_mismatch(step):
    gaps = [TRAINER[n][t] - ENGINE[n][t] for n, mask in enumerate(MASKS) for t, bit in enumerate(mask) if bit]
    assert step["train/mis_kl"] == pytest.approx(-np.mean(gaps), rel=1e-6)
    assert step["train/mis_ratio_max"] == pytest.approx(math.exp(1.2), rel=1e-6)
    assert step["train/mis_ratio_min"] == pytest.approx(math.exp(-0.9), rel=1e-6)
    assert "train/mis_chi2_seq" in step


async def test_taken_from_the_rollout(bound):
    """The ratio is then exp(l - rollout), and is clipped; there is no forward, and no mismatch to report."""
    run = bound(*ONE_STEP, "--use-rollout-logprobs")
    trainer, report = await train(run)
    assert trainer.scored == 0

    def clipped(n, t):
        ratio = math.exp(TRAINER[n][t] - ENGINE[n][t])
        return 0.0 if (ratio > 1.2 if ADVANTAGES[n] > 0 else ratio < 0.8) else 1.0

    same(trainer.gradients, expected_gradients(clipped, old=ENGINE))
    assert [clipped(0, t) for t in range(3)] == [1, 0, 1]
    assert not [name for name in report.steps[0] if "mis_" in name or "abs_diff" in name]
    assert report.rollout["rollout/log_probs"] == report.rollout["rollout/rollout_log_probs"]


async def test_taken_from_the_rollout_and_yet_compared(bound):
    """get_mismatch_metrics scores the trainer's for the metrics alone: the loss is as without it."""
    plain, _ = await train(bound(*ONE_STEP, "--use-rollout-logprobs"))
    trainer, report = await train(bound(*ONE_STEP, "--use-rollout-logprobs", "--get-mismatch-metrics"))
    assert trainer.scored == 1
    same(trainer.gradients, plain.gradients)
    assert_mismatch(report.steps[0])
    assert report.steps[0]["train/train_rollout_logprob_abs_diff"] == pytest.approx(3.1 / 6, rel=1e-6)
    assert report.rollout["rollout/log_probs"] == pytest.approx(mean_trained(TRAINER), rel=1e-6)
    assert report.rollout["rollout/rollout_log_probs"] == pytest.approx(mean_trained(ENGINE), rel=1e-6)


async def test_opsm_with_the_engines_log_probs_masks_in_the_first_step(bound):
    """Sample 1 has A < 0, and its trained tokens are 0.2 nats likelier than the engine reported, in the mean; then 0.1 less."""
    flags = (*ONE_STEP, "--use-rollout-logprobs", "--corrections", "opsm")
    trainer, report = await train(bound(*flags))
    assert trainer.scored == 0
    assert trainer.gradients[1].any()
    assert report.steps[0]["train/opsm_clipfrac"] == 0
    groups = make_groups()
    groups[0].samples[1].rollout_log_probs[:] = TRAINER[1] + [0.1, 99.0, 0.2, 0.0]
    trainer, report = await train(bound(*flags), groups)
    assert not trainer.gradients[1].any()
    assert trainer.gradients[0].any()
    assert report.steps[0]["train/opsm_clipfrac"] == pytest.approx(1 / 4)


@pytest.mark.parametrize("flags", [("--corrections", "tis"), ("--use-rollout-logprobs",), ("--get-mismatch-metrics",)])
async def test_engine_log_probs_that_are_missing_where_they_are_read_name_the_sample(bound, flags):
    groups = make_groups()
    groups[0].samples[1].rollout_log_probs[2] = np.nan
    with pytest.raises(
        TrainingError, match=r"not finite: sample 1 \(group 0\): rollout_log_probs. Pass --on-nonfinite skip"
    ):
        await train(bound(*ONE_STEP, *flags), groups)
    # Log-probs of a tool's tokens are not checked.
    groups = make_groups()
    groups[0].samples[1].rollout_log_probs[1] = np.nan
    await train(bound(*ONE_STEP, *flags), groups)


def mean_trained(rows):
    return np.mean([rows[n][t] for n, mask in enumerate(MASKS) for t, bit in enumerate(mask) if bit])


@contextlib.contextmanager
def replaced(rows, number, row):
    before, rows[number] = rows[number], row
    yield
    rows[number] = before


@pytest.mark.parametrize("scored", [True, False])
async def test_a_sample_that_is_not_finite_is_left_out(bound, scored):
    words = TWO_STEPS if scored else (*TWO_STEPS, "--use-rollout-logprobs")
    values = TRAINER if scored else ENGINE
    name = "old_log_probs" if scored else "rollout_log_probs"
    with replaced(values, 1, np.where([False, False, True, False], np.nan, values[1])):
        with pytest.raises(TrainingError, match=rf"not finite: sample 1 \(group 0\): {name}. Pass --on-nonfinite skip"):
            await train(bound(*words))
        trainer, report = await train(bound(*words, "--on-nonfinite", "skip"))
    assert report.rollout["rollout/nonfinite_samples"] == 1
    # No rank computes this sample; its reward and its rollout still count in the statistics of the others.
    assert trainer.step_of_sample.tolist() == [0, -1, 1, 1]
    masked = make_groups()
    first, second = masked[0].samples
    masked[0] = replace(masked[0], samples=(first, replace(second, loss_mask=np.zeros(4, np.uint8))))
    expected, _ = await train(bound(*words), masked)
    for n in (0, 2, 3):
        np.testing.assert_array_equal(trainer.gradients[n], expected.gradients[n])
    assert trainer.gradients[0].any()
    assert not trainer.gradients[1].any()


async def test_a_step_without_a_finite_sample(bound):
    nan = np.full(4, np.nan)
    with (
        replaced(TRAINER, 0, nan[:3]),
        replaced(TRAINER, 1, nan),
        pytest.raises(TrainingError, match="all samples of optimizer step 0 have log"),
    ):
        await train(bound(*TWO_STEPS, "--on-nonfinite", "skip"))
