"""TrainGroup: results of data-parallel shards and context-parallel parts come back in the batch's order."""

import asyncio
import contextlib
import threading
from dataclasses import replace

import numpy as np
import pytest

from slime_core.algorithm.advantages import AdvantageConfig
from slime_core.algorithm.flops import ModelShape
from slime_core.algorithm.micro_batches import MicroBatchLimits
from slime_core.config.roles import RolePlan, Scoring
from slime_core.contracts.aggregation import Aggregation
from slime_core.contracts.backend import Layout
from slime_core.contracts.correction import BatchCorrection, OffPolicyCorrection
from slime_core.contracts.needs import Need
from slime_core.controller.learner import Learner, LearnerPlan
from slime_core.errors import NonfiniteWeights, RolloutError, TrainingError
from slime_core.types.batch import TokenColumns
from slime_core.types.report import StepReport
from slime_core.workers.devices import Devices
from slime_core.workers.train_group import TrainedSteps, TrainerLimits, TrainGroup

SHAPE = ModelShape(num_layers=1, hidden=8, num_heads=2, num_kv_heads=2, head_dim=4, ffn=8, vocab=30)
# Uneven; one empty response; sample 3 and 4 are one rollout.
LENGTHS = [(2, 3), (1, 6), (4, 0), (1, 2), (3, 1), (2, 5), (1, 1)]
ROLLOUT = [0, 1, 2, 3, 3, 4, 5]


class Rank:
    """Scores a token by its id, at positions that it holds; training records its arguments."""

    def __init__(self, layout, fail=None):
        self.layout = layout
        self.fail = fail
        self.calls, self.trained = [], []
        self.rollout_ids = []
        self.skipped = False
        self.nonfinite = None

    async def call(self, method, *args, **kwargs):
        self.calls.append((method, args, kwargs))
        await asyncio.sleep(0)
        if self.fail is not None:
            raise self.fail
        return getattr(self, method)(*args, **kwargs) if hasattr(self, method) else method

    def forward_only(self, shard, micros, weights, entropy):
        column = np.full(len(shard.mask), np.nan, np.float32)
        for micro in micros:
            for sample in micro:
                rows = shard.response_rows(np.array([sample]))
                tokens = shard.tokens[shard.token_offsets[sample] :][shard.prompt_length[sample] :][: len(rows)]
                mine = np.arange(len(rows)) % self.layout.cp_size == self.layout.cp_rank
                column[rows[mine]] = tokens[mine] + (1000 if weights == "reference" else 0)
        if not self.layout.reports:
            column[:] = 5
        return {"log_probs": column}

    def train(self, shard, columns, steps, rollout_id):
        self.rollout_ids.append(rollout_id)
        reports = []
        for micros in steps:
            chosen = [int(sample) for micro in micros for sample in micro]
            self.trained.append((shard, columns, micros))
            cp_rank, cp_size = self.layout.cp_rank, self.layout.cp_size
            rows = [shard.response_rows(np.array([sample]))[cp_rank::cp_size] for sample in chosen]
            total = float(sum(columns.loss_weight[one].sum() for one in rows))
            reports.append(
                StepReport(
                    sums={"loss": total, "rank": 1.0} if self.layout.reports else {},
                    grad_norm=2.0,
                    lr=0.1,
                    skipped=self.skipped,
                    nonfinite=self.nonfinite,
                )
            )
        return reports

    async def stream(self, method, version, bucket_bytes):
        self.calls.append((method, version, bucket_bytes))
        for number in range(3):
            await asyncio.sleep(0)
            yield f"{number}" if self.layout.dp_rank == self.layout.cp_rank == 0 else None


class Launcher:
    def __init__(self):
        self.shared = []

    def share(self, value):
        self.shared.append(value)
        return value


LAYOUTS = {
    "one": [Layout()],
    "dp2": [Layout(dp_rank=r, dp_size=2) for r in range(2)],
    "dp2 cp2": [Layout(dp_rank=r // 2, dp_size=2, cp_rank=r % 2, cp_size=2) for r in range(4)],
    "dp2 tp2": [Layout(dp_rank=r // 2, dp_size=2, reports=r % 2 == 0) for r in range(4)],
}


def trainers(layouts, *, max_tokens=9, multiple=1, balance=True):
    ranks = [Rank(layout) for layout in layouts]
    limits = MicroBatchLimits(max_tokens=max_tokens, multiple=multiple)
    launcher = Launcher()
    made = TrainGroup(
        launcher, ranks, layouts, limits=TrainerLimits(train=limits, score=limits, balance=balance), shape=SHAPE
    )
    return made, ranks, launcher


@pytest.fixture
def batch(make_batch):
    made = make_batch(LENGTHS, rollout_id=ROLLOUT)
    # So that every token is its own name.
    made.tokens[:] = np.arange(len(made.tokens))
    return made


def response_tokens(batch):
    return [
        token
        for sample, (prompt, response) in enumerate(LENGTHS)
        for token in range(batch.token_offsets[sample] + prompt, batch.token_offsets[sample] + prompt + response)
    ]


STEPS = np.array([0, 0, 0, 1, 1, 1, 1])


@pytest.mark.parametrize("layouts", LAYOUTS.values(), ids=LAYOUTS)
async def test_scores_come_back_in_the_order_of_the_batch(batch, layouts):
    made, ranks, launcher = trainers(layouts)
    dispatch = made.dispatch(batch, STEPS)
    scores = await made.score(dispatch)
    assert scores["log_probs"].tolist() == response_tokens(batch)
    scores = await made.score(dispatch, weights="reference", entropy=True)
    assert scores["log_probs"].tolist() == [1000 + token for token in response_tokens(batch)]
    assert ranks[-1].calls[-1][2] == {"weights": "reference", "entropy": True}
    # The tokens went out once for each data-parallel rank, however often they are used.
    assert len(launcher.shared) == layouts[0].dp_size


@pytest.mark.parametrize("layouts", LAYOUTS.values(), ids=LAYOUTS)
async def test_training_gives_every_sample_to_its_step_with_its_own_columns(batch, layouts):
    made, ranks, _ = trainers(layouts, multiple=2)
    column = np.array(response_tokens(batch), np.float32)
    dispatch = made.dispatch(batch, STEPS)
    trained = await made.train(dispatch, TokenColumns(loss_weight=column, advantages=-column), 4)
    assert trained.nonfinite is None
    steps = trained.metrics
    assert len(steps) == 2
    assert [rank.rollout_ids for rank in ranks] == [[4]] * len(ranks)
    for step, metrics in enumerate(steps):
        rows = np.isin(batch.sample_of_token, np.flatnonzero(step == STEPS))
        assert metrics["loss"] == column[rows].sum()
        assert metrics["rank"] == sum(layout.reports for layout in layouts)
        assert (metrics["grad_norm"], metrics["lr-pg_0"], metrics["skipped_steps"]) == (2.0, 0.1, 0.0)
    seen = []
    for rank in ranks:
        for step, (shard, columns, micros) in enumerate(rank.trained):
            assert len(micros) % 2 == 0
            for micro in micros:
                for sample in micro:
                    rows = shard.response_rows(np.array([sample]))
                    start = shard.token_offsets[sample] + shard.prompt_length[sample]
                    tokens = shard.tokens[start : start + len(rows)]
                    assert columns.loss_weight[rows].tolist() == tokens.tolist()
                    assert columns.advantages[rows].tolist() == (-tokens).tolist()
                    if rank.layout.cp_rank == 0 and rank.layout.reports:
                        seen.append((step, int(shard.index[sample])))
    assert sorted(seen) == sorted(zip(STEPS.tolist(), range(len(LENGTHS)), strict=True))


@pytest.mark.parametrize("multiple", [1, 3])
async def test_all_ranks_get_equally_many_micro_batches(batch, multiple):
    made, _, _ = trainers(LAYOUTS["dp2"], multiple=multiple, max_tokens=7)
    dispatch = made.dispatch(batch, STEPS)
    for step in range(2):
        counts = {len(shard.steps[step]) for shard in dispatch.shards}
        assert len(counts) == 1
        assert counts.pop() % multiple == 0
    counts = {len(shard.scoring) for shard in dispatch.shards}
    assert len(counts) == 1
    assert counts.pop() % multiple == 0
    for shard in dispatch.shards:
        assert sorted(np.concatenate(shard.scoring).tolist()) == list(range(len(shard.samples)))


async def test_more_ranks_than_samples(make_batch):
    made, ranks, _ = trainers([Layout(dp_rank=r, dp_size=3) for r in range(3)])
    batch = make_batch([(1, 2)])
    dispatch = made.dispatch(batch, np.array([0]))
    assert np.isfinite((await made.score(dispatch))["log_probs"]).all()
    (step,) = (await made.train(dispatch, TokenColumns(loss_weight=np.ones(2, np.float32)), 0)).metrics
    assert step["loss"] == 2
    assert [len(rank.trained[0][2]) for rank in ranks] == [1, 1, 1]


async def test_one_skipping_rank_makes_a_skipped_step(batch):
    made, ranks, _ = trainers(LAYOUTS["dp2"])
    ranks[1].skipped = True
    trained = await made.train(made.dispatch(batch, STEPS), TokenColumns(loss_weight=np.ones(18, np.float32)), 0)
    assert [step["skipped_steps"] for step in trained.metrics] == [1.0, 1.0]


async def test_what_one_rank_found_not_finite_is_reported(batch):
    made, ranks, _ = trainers(LAYOUTS["dp2"])
    ranks[1].nonfinite = "weight norm is not finite"
    trained = await made.train(made.dispatch(batch, STEPS), TokenColumns(loss_weight=np.ones(18, np.float32)), 0)
    assert trained.nonfinite == "weight norm is not finite"


async def test_a_failing_rank_is_reported_at_once(batch):
    made, ranks, _ = trainers(LAYOUTS["dp2"])
    ranks[1].fail = TrainingError("rank 1 broke")
    with pytest.raises(TrainingError, match="rank 1 broke"):
        await made.score(made.dispatch(batch, STEPS))


async def test_all_ranks_take_part_in_an_export_and_the_first_one_yields():
    made, ranks, _ = trainers(LAYOUTS["dp2 cp2"])
    assert [bucket async for bucket in made.stream_weights(4, 1024)] == ["0", "1", "2"]
    assert all(rank.calls == [("export_weights", 4, 1024)] for rank in ranks)


async def test_calls_reach_every_rank(tmp_path):
    made, ranks, _ = trainers(LAYOUTS["dp2"])
    await made.save(tmp_path)
    await made.load(tmp_path)
    assert await made.call_all("sleep") == ["sleep", "sleep"]
    for rank in ranks:
        assert [call[0] for call in rank.calls] == ["save", "load", "sleep"]


# --- The learner ------------------------------------------------------------------------------------------------------


class FakeTrainers:
    """Returns `scores` as scores; skips the steps of `skips`. Every call is written into `log`. `nonfinite`: what a step leaves
    that is not finite."""

    def __init__(self, scores=None, skips=(), *, name="actor", log=None, output="log_probs", nonfinite=None):
        self.scores, self.skips, self.nonfinite = scores or {}, list(skips), nonfinite
        self.grad_norm = 0.5
        self.name, self.output = name, output
        self.log = [] if log is None else log
        self.asked, self.trained, self.called = [], [], []
        self.inside = False

    def forward_tflop(self, batch):
        return float(len(batch.tokens))

    @contextlib.asynccontextmanager
    async def turn(self):
        self.inside = True
        yield
        self.inside = False

    def dispatch(self, batch, steps):
        self.batch, self.steps = batch, steps
        return type("Dispatch", (), {"batch": batch})

    async def score(self, dispatch, *, weights):
        assert self.inside
        self.log.append((self.name, "forward_only", weights))
        self.asked.append(weights)
        default = np.full(len(dispatch.batch.mask), -1, np.float32)
        return {self.output: self.scores.get(weights, default)}

    async def train(self, dispatch, columns, rollout_id):
        assert self.inside
        self.log.append((self.name, "train"))
        self.rollout_id = rollout_id
        self.trained.append(columns)
        count = int(self.steps.max()) + 1
        fixed = {"loss": 1.0, "lr-pg_0": 1e30, "grad_norm": self.grad_norm}
        metrics = [{**fixed, "skipped_steps": float(self.skips.pop(0) if self.skips else 0)} for _ in range(count)]
        return TrainedSteps(metrics=metrics, nonfinite=self.nonfinite)

    async def call_all(self, method, *args):
        assert self.inside
        self.called.append((method, *args))


def trained_metrics(prefix):
    """Of a step of FakeTrainers."""
    metrics = {"loss": 1.0, "lr-pg_0": 1e30, "grad_norm": 0.5, "skipped_steps": 0.0}
    return {f"{prefix}{name}": value for name, value in metrics.items()}


OLD = Scoring(column=Need.OLD_LOGPROBS, output="log_probs")
REF = Scoring(column=Need.REF_LOGPROBS, output="log_probs", weights="reference")
VALUES = Scoring(column=Need.VALUES, output="values", by_others=True)
ACTOR_COLUMNS = frozenset({"loss_weight", "advantages", "returns", "old_log_probs", "ref_log_probs", "correction"})


def plan(**changes):
    rules = AdvantageConfig(
        advantage=None,
        aggregation=Aggregation.SEQ_MEAN,
        rollouts_per_step=changes.pop("per_step", 4),
        max_response_len=8,
        corrections=changes.pop("corrections", ()),
    )
    scoring = changes.pop("scoring", (OLD,))
    actor = RolePlan(name="actor", scoring=scoring, columns=ACTOR_COLUMNS, corrected=True)
    actor = replace(actor, updated_frozen_models=("reference",) if REF in scoring else ())
    given = {
        "roles": (actor,),
        "old_from_rollout": False,
        "rules": rules,
        "rollouts_per_batch": 4,
        "train_short_batch": False,
        "max_skipped_steps": 1,
        "ref_update_interval": None,
    }
    return LearnerPlan(**(given | changes))


def learner(trainers, **changes):
    events = []
    trainers = trainers if isinstance(trainers, dict) else {"actor": trainers}
    return Learner(trainers, plan(**changes), on_batch=lambda *event: events.append(event)), events


@pytest.fixture
def groups(make_group):
    return [make_group([1.0, 0.0], group_index=n) for n in range(2)]


async def test_a_batch_is_scored_credited_and_trained(groups):
    trainers = FakeTrainers()
    made, events = learner(trainers)
    report = await made.train(7, groups, 3)
    assert report.version == 4
    assert trainers.rollout_id == 7
    assert trainers.asked == ["actor"]
    assert report.steps == ({"train/global_batch_size": 4.0, **trained_metrics("train/")},)
    assert report.rollout["rollout/raw_reward"] == 0.5
    assert report.rollout["rollout/log_probs"] == -1
    assert report.perf["perf/train_tokens"] == 16
    ((rollout_id, version, batch, columns),) = events
    assert (rollout_id, version, batch.num_samples) == (7, 3, 4)
    assert columns.loss_weight is trainers.trained[0].loss_weight
    assert columns.loss_weight.tolist() == [0.125] * 8


async def test_requests_are_served_while_a_batch_is_prepared(groups):
    """Work over all samples waits for the event loop, which would wait for it in turn."""
    served = threading.Event()

    class Waits(FakeTrainers):
        def dispatch(self, batch, step_of_sample):
            assert served.wait(60)
            served.clear()
            asyncio.run_coroutine_threadsafe(serve(), loop)
            return super().dispatch(batch, step_of_sample)

    class Slow(OffPolicyCorrection):
        def correct_batch(self, batch, columns):
            assert served.wait(60)
            return BatchCorrection(
                weights=np.ones_like(batch.mask, np.float32), keep=batch.mask.astype(bool), metrics={}
            )

    async def serve():
        served.set()

    loop = asyncio.get_running_loop()
    loop.call_later(0.01, served.set)
    made, _ = learner(Waits(), corrections=[(Slow(), frozenset())])
    assert (await made.train(7, groups, 3)).version == 4


async def test_before_steps_is_called_before_the_first_optimizer_step(groups):
    calls = []

    class RecordingTrainers(FakeTrainers):
        async def train(self, dispatch, columns, rollout_id):
            calls.append("trained")
            return await super().train(dispatch, columns, rollout_id)

    def made(on_batch, **changes):
        return Learner(
            {"actor": RecordingTrainers()},
            plan(**changes),
            on_batch=on_batch,
            before_steps=lambda: calls.append("now"),
        )

    await made(lambda *event: calls.append("batch")).train(0, groups, 3)
    assert calls == ["batch", "now", "trained"]
    calls.clear()

    def full(*event):
        raise OSError("no space left")

    with pytest.raises(OSError, match="no space left"):
        await made(full).train(0, groups, 3)
    with pytest.raises(RolloutError, match="5 are requested"):
        await made(full, rollouts_per_batch=5).train(0, groups, 3)
    assert calls == []


@pytest.mark.parametrize(
    ("changes", "asked", "given"),
    [
        ({"scoring": ()}, [], []),
        ({"scoring": (REF,)}, ["reference"], ["ref_log_probs"]),
        ({"scoring": (OLD, REF)}, ["actor", "reference"], ["old_log_probs", "ref_log_probs"]),
        ({"scoring": (), "old_from_rollout": True}, [], ["old_log_probs"]),
    ],
)
async def test_only_needed_columns_are_scored(groups, changes, asked, given):
    trainers = FakeTrainers()
    made, _ = learner(trainers, **changes)
    await made.train(0, groups, 0)
    assert trainers.asked == asked
    assert sorted(trainers.trained[0].present()) == sorted([*given, "loss_weight"])


async def test_scores_that_are_not_finite_stop_the_run(groups):
    scores = np.zeros(8, np.float32)
    scores[5] = np.nan
    made, _ = learner(FakeTrainers({"actor": scores}))
    with pytest.raises(TrainingError, match=r"not finite: sample 2 \(group 1\): old_log_probs"):
        await made.train(0, groups, 0)


async def test_a_short_batch_is_an_error_or_trained_with_its_own_denominator(groups):
    made, _ = learner(FakeTrainers())
    with pytest.raises(RolloutError, match=r"2 rollouts, but 4 are requested.*--on-short-batch train"):
        await made.train(0, groups[:1], 0)
    trainers = FakeTrainers()
    made, _ = learner(trainers, train_short_batch=True)
    await made.train(0, groups[:1], 0)
    assert trainers.trained[0].loss_weight.tolist() == [0.25] * 4


async def test_a_batch_with_too_many_rollouts_is_always_an_error(groups):
    """It would be another optimizer step, off-policy although the config does not set one."""
    for short in (False, True):
        made, _ = learner(FakeTrainers(), rollouts_per_batch=3, per_step=3, train_short_batch=short)
        with pytest.raises(RolloutError, match="4 rollouts, but 3 are requested"):
            await made.train(0, groups, 0)


async def test_skipped_steps_in_a_row_end_the_run(groups):
    made, _ = learner(FakeTrainers(skips=[1, 0, 1, 0, 1, 1]), per_step=2)
    reports = [await made.train(step, groups, step) for step in range(3)]
    assert [report.stuck for report in reports[:2]] == [None, None]
    assert reports[2].stuck.startswith(
        "2 optimizer steps of the actor in a row had a loss or gradient that is not finite"
    )
    assert "(--max-skipped-steps 1)" in reports[2].stuck


async def test_weights_that_are_not_finite_end_the_run(groups):
    trainers = FakeTrainers(nonfinite="weight norm is not finite")
    made, _ = learner(trainers, scoring=(OLD, REF), ref_update_interval=1)
    with pytest.raises(NonfiniteWeights) as raised:
        await made.train(3, groups, 3)
    assert str(raised.value) == (
        "step 3: weight norm is not finite after optimizer step 1 of the actor (learning rate 1e+30, norm of the gradient "
        "0.5). These weights are not saved, and no engine gets them. Lower --lr."
    )
    assert trainers.called == [], "the reference got the weights"
    trainers, roles, _ = two_roles(nonfinite="exp_avg of score.weight is not finite")
    made, _ = learner(trainers, roles=roles)
    with pytest.raises(NonfiniteWeights, match=r"exp_avg of score.weight .* of the critic .* Lower --critic-lr\."):
        await made.train(0, groups, 0)


async def test_a_batch_without_a_signal_is_reported_of_the_policy_alone(groups):
    trainers, roles, _ = two_roles()
    trainers["critic"].grad_norm = 0.0
    made, _ = learner(trainers, roles=roles)
    assert (await made.train(0, groups, 0)).no_signal is None
    trainers["actor"].grad_norm = 0.0
    assert (await made.train(1, groups, 1)).no_signal.startswith("the gradient is 0 (")
    idle, roles, _ = two_roles(idle_steps=1)
    idle["critic"].grad_norm = 0.0
    made, _ = learner(idle, roles=roles)
    assert (await made.train(0, groups, 0)).no_signal is None


async def test_the_reference_is_refreshed_when_due(groups):
    trainers = FakeTrainers()
    made, _ = learner(trainers, scoring=(OLD, REF), ref_update_interval=2)
    for step in range(4):
        await made.train(step, groups, step)
    assert trainers.called == [("update_frozen_model", "reference")] * 2


# --- Several roles ----------------------------------------------------------------------------------------------------


def two_roles(*, idle_steps=0, actor_scoring=(OLD,), values=None, skips=(), nonfinite=None):
    log = []
    trainers = {
        "actor": FakeTrainers(name="actor", log=log),
        "critic": FakeTrainers(
            {"actor": np.zeros(8, np.float32) if values is None else values},
            skips,
            name="critic",
            log=log,
            output="values",
            nonfinite=nonfinite,
        ),
    }
    roles = (
        RolePlan(name="actor", idle_steps=idle_steps, scoring=actor_scoring, columns=ACTOR_COLUMNS, corrected=True),
        RolePlan(
            name="critic",
            metric_prefix="critic-",
            scoring=(VALUES,),
            columns=frozenset({"loss_weight", "advantages", "returns", "values"}),
        ),
    )
    return trainers, roles, log


class Halve(OffPolicyCorrection):
    def correct_batch(self, batch, columns):
        assert columns.old_log_probs is not None
        return BatchCorrection(
            weights=np.full(len(batch.mask), 0.5, np.float32),
            keep=np.ones(len(batch.mask), np.bool_),
            metrics={"halved": np.ones(len(batch.mask))},
        )


HALVE = ((Halve(), frozenset({Need.OLD_LOGPROBS})),)


async def test_roles_are_scored_in_order_and_trained_the_other_way_round(groups):
    trainers, roles, log = two_roles()
    made, events = learner(trainers, roles=roles, corrections=HALVE)
    report = await made.train(0, groups, 0)
    assert log == [
        ("actor", "forward_only", "actor"), ("critic", "forward_only", "actor"), ("critic", "train"), ("actor", "train")
    ]  # fmt: skip
    # Each role gets the columns that its loss reads: the critic no log-probs and no correction, the actor no values.
    (of_actor,), (of_critic,) = trainers["actor"].trained, trainers["critic"].trained
    assert set(of_actor.present()) == {"loss_weight", "old_log_probs", "correction"}
    assert set(of_critic.present()) == {"loss_weight", "values"}
    assert {"values", "old_log_probs", "correction"} <= set(events[0][3].present())
    assert of_actor.loss_weight.tolist() == of_critic.loss_weight.tolist()
    (step,) = report.steps
    assert step == {
        "train/global_batch_size": 4.0, "train/halved": 1.0,
        **trained_metrics("train/"), **trained_metrics("train/critic-"),
    }  # fmt: skip
    assert report.rollout["rollout/values"] == 0
    assert report.rollout["rollout/log_probs"] == -1
    assert {"perf/actor_train_time", "perf/critic_train_time", "perf/train_tok_per_s"} <= set(report.perf)


async def test_an_idle_role_is_neither_trained_nor_scored_for_itself(groups):
    trainers, roles, log = two_roles(idle_steps=2)
    made, _ = learner(trainers, roles=roles, corrections=HALVE)
    for rollout_id in range(3):
        report = await made.train(rollout_id, groups, rollout_id)
        assert report.version == rollout_id + 1
    of_critic_alone = [("critic", "forward_only", "actor"), ("critic", "train")]
    assert log[:4] == of_critic_alone * 2
    assert log[4:] == [("actor", "forward_only", "actor"), *of_critic_alone, ("actor", "train")]
    assert "correction" not in trainers["critic"].trained[0].present()


async def test_metrics_of_a_step_that_trains_one_role_are_that_roles(groups):
    trainers, roles, _ = two_roles(idle_steps=1)
    made, _ = learner(trainers, roles=roles, corrections=HALVE, per_step=2)
    report = await made.train(0, groups, 0)
    assert len(report.steps) == 2
    for step in report.steps:
        assert set(step) == {"train/global_batch_size", *trained_metrics("train/critic-")}
    assert "rollout/log_probs" not in report.rollout
    assert "perf/actor_train_time" not in report.perf


async def test_columns_that_other_roles_read_are_scored_in_idle_steps_too(groups):
    """The KL in the reward needs the log-probs of a policy that is not trained yet."""
    scoring = (replace(OLD, by_others=True), REF)
    trainers, roles, log = two_roles(idle_steps=1, actor_scoring=scoring)
    made, _ = learner(trainers, roles=roles)
    await made.train(0, groups, 0)
    assert log == [("actor", "forward_only", "actor"), ("critic", "forward_only", "actor"), ("critic", "train")]


async def test_values_that_are_not_finite_stop_the_run(groups):
    values = np.zeros(8, np.float32)
    values[5] = np.inf
    trainers, roles, _ = two_roles(values=values)
    made, _ = learner(trainers, roles=roles)
    with pytest.raises(TrainingError, match=r"not finite: sample 2 \(group 1\): values"):
        await made.train(0, groups, 0)


async def test_skipped_steps_are_counted_for_each_role(groups):
    trainers, roles, _ = two_roles(skips=[1, 1])
    made, _ = learner(trainers, roles=roles)
    assert (await made.train(0, groups, 0)).stuck is None
    stuck = (await made.train(1, groups, 1)).stuck
    assert stuck.startswith("2 optimizer steps of the critic in a row ")
    assert "lower --critic-lr" in stuck


class Sleeper:
    """Logs every sleep and wake; fails at two of the same kind in a row."""

    def __init__(self, name, log, *, awake=True):
        self.name, self.log, self.awake = name, log, awake

    async def call_all(self, method):
        await asyncio.sleep(0)
        assert self.awake == (method == "sleep"), (self.name, method)
        self.awake = method == "wake_up"
        self.log.append(f"{method} {self.name}")


async def work(devices, sleeper):
    async with devices.turn(sleeper):
        sleeper.log.append(f"begin {sleeper.name}")
        await asyncio.sleep(0.01)
        assert sleeper.awake
        sleeper.log.append(f"end {sleeper.name}")


async def test_roles_that_share_devices_take_turns():
    log = []
    devices = Devices()
    actor, critic = Sleeper("actor", log), Sleeper("critic", log)
    await devices.settle(actor)
    await asyncio.gather(work(devices, actor), work(devices, critic))
    assert log == ["begin actor", "end actor", "begin critic", "end critic"]


async def test_roles_with_devices_of_their_own_work_at_once():
    log = []
    await asyncio.gather(*(work(Devices(), Sleeper(name, log)) for name in ("actor", "critic")))
    assert log == ["begin actor", "begin critic", "end actor", "end critic"]


async def test_with_offload_the_others_sleep_and_devices_change_hands_twice_a_step():
    log = []
    devices = Devices(offload=True)
    actor, critic = Sleeper("actor", log), Sleeper("critic", log)
    for sleeper in (actor, critic):
        await devices.settle(sleeper)
    assert not actor.awake
    assert not critic.awake
    log.clear()
    for _ in range(2):
        # A step: scored in order, trained the other way round, then the policy's weights are sent to the engines.
        for sleeper in (actor, critic, critic, actor, actor):
            await work(devices, sleeper)
            assert [actor.awake, critic.awake].count(True) == 1
    changes = [line for line in log if not line.startswith(("begin", "end"))]
    assert changes == ["wake_up actor", *["sleep actor", "wake_up critic", "sleep critic", "wake_up actor"] * 2]


@pytest.mark.parametrize("failing", [("sleep", True), ("wake_up",)])
async def test_a_partly_offloaded_role_is_woken_completely_by_its_next_turn(failing):
    """Some ranks may be offloaded when another one fails: they must not be used before `wake` is called."""
    calls = []

    class Failing:
        failed = False

        async def call_all(self, *call):
            calls.append(call)
            if call == failing and not self.failed:
                self.failed = True
                raise TrainingError("one rank has no room")

    role, devices = Failing(), Devices(offload=True)
    await devices.settle(role)

    async def train_and_update_weights():
        for weights_only in (False, True):
            async with devices.turn(role, weights_only=weights_only):
                pass

    with pytest.raises(TrainingError):
        await train_and_update_weights()
    calls.clear()
    async with devices.turn(role):
        assert calls == [("wake_up",)]
    async with devices.turn(role):
        assert calls == [("wake_up",)], "it is awake"


async def test_a_failure_inside_a_turn_lets_the_next_one_in():
    log = []
    devices = Devices()
    with pytest.raises(TrainingError):
        async with devices.turn(Sleeper("actor", log)):
            raise TrainingError("broke")
    await work(devices, Sleeper("critic", log))
    assert log == ["begin critic", "end critic"]
