"""Expert ids on their way: from the engine's responses through trajectories, files and batches to micro-batches."""

import asyncio
import contextlib
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from slime_core.algorithm.build_batch import build_batch
from slime_core.algorithm.packing import pack_micro_batch
from slime_core.contracts.setup import RoutingReplay
from slime_core.controller.learner import Learner, LearnerPlan
from slime_core.data.table import read_groups, write_groups
from slime_core.data.train_data import read_train_data, write_train_data
from slime_core.errors import ConfigError, EngineError, RolloutError
from slime_core.rollout.episode import EngineEpisode
from slime_core.types.batch import TokenColumns
from slime_core.types.completion import Completion, FinishReason, SamplingParams
from slime_core.types.prompt import Prompt
from slime_core.types.sample import Sample, SampleGroup, Status, VersionSpan
from slime_core.types.trajectory import Trajectory
from slime_core.workers.train_group import TrainedSteps
from slime_training.context_parallel import split_micro_batch

PROMPT = Prompt(group_index=0, text="q", token_ids=np.array([5, 6, 7], np.int32))
LAYERS, TOP_K = 3, 2
SAMPLING = SamplingParams(max_new_tokens=9)


def chosen(tokens, version=0, experts=256):
    """(T - 1, L, K): by the token, its place, the layer, and which policy chose."""
    rows = np.arange(len(tokens) - 1)[:, None, None]
    ids = 31 * np.asarray(tokens)[:-1, None, None] + 7 * rows + 3 * np.arange(LAYERS)[:, None] + np.arange(TOP_K)
    return (ids + 11 * version) % experts


class Engine:
    """Responds with these tokens, one turn after the other, and returns the requested ids."""

    def __init__(self, *turns, experts=256):
        self.turns, self.experts = list(turns), experts
        self.asked = []
        self.version = 0

    async def generate(self, request):
        self.asked.append(request.routed_experts_from)
        tokens = np.array(self.turns.pop(0), np.int32)
        whole = chosen([*request.token_ids, *tokens], self.version, self.experts)
        return Completion(
            request_id=request.request_id,
            token_ids=tokens,
            log_probs=np.full(len(tokens), -1, np.float32),
            finish_reason=FinishReason.STOP if len(tokens) else FinishReason.ABORT,
            spans=(VersionSpan(self.version, 0, len(tokens)),),
            routed_experts=whole[request.routed_experts_from :].astype(np.uint16) if len(tokens) else None,
        )


class Letters:
    is_fast = False

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(97 + i) for i in ids)


def episode_on(engine, kept=None, **more):
    settings = {
        "prompt": PROMPT, "index": 0, "position": 0, "scope": "train", "attempt": 0, "seed": 1, "stop": asyncio.Event(),
        "sampling": SAMPLING, "max_context_len": None, "client": engine, "tokenizer": Letters(), "evaluation": False,
        "kept": kept, "routed_experts": True,
    }  # fmt: skip
    return EngineEpisode(**(settings | more))


async def turns(episode, *environment):
    """A response, and one more after everything that the environment writes."""
    grown = episode.trajectory()
    grown.append_completion(await episode.complete(grown.tokens))
    for tokens in environment:
        grown.append_environment(tokens)
        grown.append_completion(await episode.complete(grown.tokens))
    return grown


async def test_each_turn_requests_new_ids_and_the_sample_has_all():
    engine = Engine([1, 2], [3], [4, 1, 1])
    grown = await turns(episode_on(engine), [8, 9], [9])
    grown.append_environment([8])
    sample = grown.finish()
    # The last token of a response is read with the next turn.
    assert engine.asked == [0, 4, 7]
    assert sample.tokens.tolist() == [5, 6, 7, 1, 2, 8, 9, 3, 9, 4, 1, 1, 8]
    assert np.array_equal(sample.routed_experts, chosen(sample.tokens[:-1]))


async def test_ids_are_not_requested_by_default():
    engine = Engine([1, 2])
    episode = episode_on(engine, routed_experts=False)
    assert (await turns(episode)).finish().routed_experts is not None  # An engine may return more than requested.
    assert engine.asked == [None]


async def test_kept_ids_stay_and_a_newer_policy_adds_to_them():
    engine = Engine([1, 2], [3, 4])
    first = (await turns(episode_on(engine))).finish(status=Status.ABORTED)
    engine.version = 1
    sample = (await turns(episode_on(engine, kept=first))).finish()
    assert engine.asked == [0, 4]
    assert sample.tokens.tolist() == [5, 6, 7, 1, 2, 3, 4]
    assert np.array_equal(sample.routed_experts[:4], chosen(sample.tokens)[:4])
    assert np.array_equal(sample.routed_experts[4:], chosen(sample.tokens, 1)[4:])


async def test_a_branch_shares_only_the_common_prefix():
    engine = Engine([1, 2, 3], [4], [1])
    episode = episode_on(engine)
    await episode.complete(PROMPT.token_ids)
    other = np.array([5, 6, 7, 1, 9, 9], np.int32)
    completion = await episode.complete(other)
    assert engine.asked == [0, 4]
    assert np.array_equal(completion.routed_experts, chosen([*other, 4]))
    # A generator may leave out the end of a response.
    grown = Trajectory(replace(PROMPT, token_ids=other), index=0, rollout_id=0, tokenizer=Letters())
    completion = await episode.complete(other)
    grown.append_completion(replace(completion, token_ids=completion.token_ids[:0], log_probs=completion.log_probs[:0]))
    assert len(grown.finish().routed_experts) == 5


async def test_an_empty_response_changes_nothing():
    engine = Engine([1, 2], [])
    grown = await turns(episode_on(engine), [8])
    assert grown.status is Status.ABORTED
    assert np.array_equal(grown.finish().routed_experts, chosen([5, 6, 7, 1, 2]))


async def test_missing_ids_and_a_response_to_another_request_are_errors():
    class Short(Engine):
        async def generate(self, request):
            completion = await super().generate(request)
            return replace(completion, routed_experts=completion.routed_experts[1:])

    with pytest.raises(EngineError, match="asked for the expert ids of 4 tokens and gave 3"):
        await episode_on(Short([1, 2])).complete(PROMPT.token_ids)
    completion = await episode_on(Engine([1, 2])).complete(PROMPT.token_ids)
    longer = Trajectory(
        replace(PROMPT, token_ids=np.arange(9, dtype=np.int32)), index=0, rollout_id=0, tokenizer=Letters()
    )
    with pytest.raises(EngineError, match="has 10 before its last: the request did not continue this trajectory"):
        longer.append_completion(completion)


def sample_of(index, response, mask, held, experts=256, **more):
    tokens = np.concatenate([PROMPT.token_ids, np.array(response, np.int32)])
    ids = None if held is None else chosen(tokens, index, experts)[:held]
    dtype = np.uint8 if ids is None or ids.max() < 256 else np.uint16
    return Sample(
        index=index, group_index=0, rollout_id=index, prompt=PROMPT, tokens=tokens, prompt_length=3,
        loss_mask=np.array(mask, np.uint8), rollout_log_probs=np.zeros(len(mask), np.float32),
        routed_experts=None if ids is None else ids.astype(dtype), **more,
    )  # fmt: skip


def groups(experts=256):
    samples = (
        sample_of(0, [1, 2, 3], [1, 1, 1], 5, experts),
        sample_of(1, [], [], None),
        # Its end is a tool's, which no engine has read.
        sample_of(2, [4, 5, 9, 9], [1, 1, 0, 0], 4, experts),
        sample_of(3, [4], [1], None, status=Status.FAILED),
    )
    return [SampleGroup(prompt=PROMPT, samples=samples)]


def expected(experts=256):
    """By a loop over the samples."""
    rows = []
    for sample in groups(experts)[0].samples:
        held = 0 if sample.routed_experts is None else len(sample.routed_experts)
        rows += [] if held == 0 else list(sample.routed_experts)
        rows += [np.tile(np.arange(TOP_K), (LAYERS, 1))] * (len(sample.tokens) - held)
    return np.array(rows)


@pytest.mark.parametrize(("experts", "dtype"), [(256, np.uint8), (300, np.uint16)])
def test_files_and_batches(tmp_path, experts, dtype):
    write_groups(tmp_path / "groups.parquet", groups(experts))
    (group,) = read_groups(tmp_path / "groups.parquet")
    assert pq.read_schema(tmp_path / "groups.parquet").field("routed_experts").type == pa.large_list(pa.uint16())
    for read, written in zip(group.samples, groups(experts)[0].samples, strict=True):
        assert (read.routed_experts is None) == (written.routed_experts is None)
        if written.routed_experts is not None:
            assert read.routed_experts.dtype == written.routed_experts.dtype
            assert np.array_equal(read.routed_experts, written.routed_experts)
    batch = build_batch([group])
    assert batch.routed_experts.dtype == dtype
    assert np.array_equal(batch.routed_experts, expected(experts))
    write_train_data(tmp_path / "data.parquet", batch, TokenColumns())
    read, _ = read_train_data(tmp_path / "data.parquet")
    assert read.routed_experts.dtype == dtype
    assert np.array_equal(read.routed_experts, batch.routed_experts)
    assert build_batch([replace(group, samples=group.samples[1:2])]).routed_experts is None


def test_a_trained_token_needs_the_ids_of_all_tokens_before_it():
    short = sample_of(0, [1, 2, 3], [0, 1, 1], 4)
    with pytest.raises(RolloutError, match="expert ids of 4 tokens, but its last trained token depends on 5"):
        build_batch([SampleGroup(prompt=PROMPT, samples=(short, *groups()[0].samples))])
    build_batch([SampleGroup(prompt=PROMPT, samples=(replace(short, remove_sample=True), *groups()[0].samples))])
    other = replace(short, routed_experts=np.zeros((5, LAYERS + 1, TOP_K), np.uint8))
    with pytest.raises(RolloutError, match=r"\(3, 2\), \(4, 2\)"):
        build_batch([SampleGroup(prompt=PROMPT, samples=(other, *groups()[0].samples))])


def test_micro_batches_and_their_parts():
    batch = build_batch(groups())
    shard = batch.take(np.array([2, 0, 1]))
    micro = pack_micro_batch(shard, np.array([1, 0]))
    starts = batch.token_offsets
    rows = [*range(starts[0], starts[1]), *range(starts[2], starts[3])]
    assert micro.samples == (1, 0)
    assert np.array_equal(micro.routed_experts, expected()[rows])
    # Sequences of 6 and 7 tokens over two ranks: chunks of 2, the second sequence with one token of padding.
    first, second = (split_micro_batch(micro, rank, 2) for rank in range(2))
    held = {0: [0, 1, 5, 5, 6, 7, 12, 12], 1: [2, 3, 4, 5, 8, 9, 10, 11]}
    for rank, part in enumerate((first, second)):
        assert part.position_ids.tolist() == micro.position_ids[held[rank]].tolist()
        assert np.array_equal(part.routed_experts, micro.routed_experts[held[rank]])
        assert part.samples == (1, 0)
    empty = pack_micro_batch(shard, np.array([], np.int64))
    assert empty.samples == ()
    assert empty.routed_experts.tolist() == [[[0, 1]] * LAYERS]


# --- A run that replays them ------------------------------------------------------------------------------------------

ABLE = """
from slime_core.contracts.setup import RoutingReplay
from slime_core.contracts.engine import Capability

FakeBackend.routing_replay_modes = frozenset(RoutingReplay)
FakeEngine.optional_capabilities = frozenset({Capability.ROUTED_EXPERTS})
"""


@pytest.fixture
def able(bound, tmp_path):
    """`bound` with a backend that replays and an engine that reports ids."""
    with (tmp_path / "fakes.py").open("a") as file:
        file.write(ABLE)
    return bound


def test_replay_requires_a_backend_and_an_engine_that_support_it(bound):
    with pytest.raises(ConfigError) as message:
        bound("--use-rollout-routing-replay")
    assert [line.split(". ")[0] for line in message.value.problems] == [
        'train.use_rollout_routing_replay = true: backend "fake" replays no choice of experts',
        'train.use_rollout_routing_replay = true: engine "fake" does not report which experts it chose',
    ]


def test_recorded_choices_require_scoring_and_resident_weights(able):
    with pytest.raises(ConfigError) as message:
        able("--use-routing-replay", "--use-rollout-logprobs", "--on-nonfinite", "skip")
    assert [line.split(". ")[0] for line in message.value.problems] == [
        'train.use_routing_replay = true: algorithm "grpo" as it is set has no forward for old log-probs, whose choice of '
        "experts could be replayed",
        'train.use_routing_replay = true, train.on_nonfinite = "skip": what is left without a sample is spread over the '
        "ranks again, away from where the choices of experts are",
    ]


def test_old_log_probs_are_scored_where_their_choice_is_replayed(able):
    plain, recorded, rollout = (
        able(*flags).roles[0] for flags in ((), ("--use-routing-replay",), ("--use-rollout-routing-replay",))
    )
    # One optimizer step: they are the current ones, and under the engine's choice still so.
    assert [len(role.plan.scoring) for role in (plain, recorded, rollout)] == [0, 1, 0]
    assert [role.plan.routing_replay for role in (plain, recorded, rollout)] == [
        None, RoutingReplay.RECORDED, RoutingReplay.ROLLOUT,
    ]  # fmt: skip


async def test_a_learner_sends_ids_to_roles_that_replay_them(able):
    flags = ("--rollout-batch-size", "2", "--n-samples-per-prompt", "2", "--global-batch-size", "4")
    message = groups()[0].samples
    four = [
        SampleGroup(
            prompt=PROMPT,
            samples=(replace(message[0], reward=1.0), replace(message[2], index=9, rollout_id=9, reward=0.0)),
        )
        for _ in range(2)
    ]
    four[1] = replace(
        four[1], samples=tuple(replace(s, index=s.index + 20, rollout_id=s.index + 20) for s in four[1].samples)
    )
    not_estimated = [replace(g, samples=tuple(replace(s, routed_experts=None) for s in g.samples)) for g in four]
    for words, given, there in (
        (("--use-rollout-routing-replay",), four, True),
        (("--use-routing-replay",), four, False),
    ):
        trainers = TrainGroup()
        learner = Learner({"actor": trainers}, LearnerPlan.of(able(*flags, *words)), on_batch=lambda *event: None)
        await learner.train(0, given, 3)
        assert (trainers.batch.routed_experts is not None) == there
    learner = Learner(
        {"actor": TrainGroup()},
        LearnerPlan.of(able(*flags, "--use-rollout-routing-replay")),
        on_batch=lambda *event: None,
    )
    with pytest.raises(RolloutError, match="the batch has no expert ids"):
        await learner.train(0, not_estimated, 3)


class TrainGroup:
    """Remembers the batch that it was sent."""

    @contextlib.asynccontextmanager
    async def turn(self):
        yield

    def forward_tflop(self, batch):
        return 0.0

    def dispatch(self, batch, step_of_sample):
        self.batch = batch
        return batch

    async def score(self, dispatch, **how):
        return {"log_probs": np.full(len(dispatch.mask), -1, np.float32)}

    async def train(self, dispatch, columns, rollout_id):
        return TrainedSteps(metrics=[{"skipped_steps": 0.0, "grad_norm": 1.0}], nonfinite=None)
