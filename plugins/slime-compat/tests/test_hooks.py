"""Hooks of whole steps, batches and sources, written for another slime."""

from __future__ import annotations

import asyncio
import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from slime_compat.old_sample import Sample
from slime_compat.plugin import (
    CompatAdvantage,
    CompatBufferFilter,
    CompatCollector,
    CompatCorrection,
    CompatGenerator,
    CompatReducer,
    CompatReward,
    CompatSource,
)
from slime_core.algorithm.advantages import AdvantageConfig, compute_advantages_and_returns
from slime_core.algorithm.build_batch import build_batch
from slime_core.config.rollout import RolloutConfig
from slime_core.config.run import DataConfig
from slime_core.contracts.advantage import CreditInputs
from slime_core.contracts.aggregation import Aggregation
from slime_core.contracts.filter import Versions
from slime_core.data.buffer import DataBuffer
from slime_core.data.pop_first import PopFirstFilter
from slime_core.errors import PluginError, RewardError, RolloutError
from slime_core.rollout.context import RolloutContext
from slime_core.rollout.groups import GroupRunner, GroupSettings
from slime_core.rollout.single_turn import SingleTurn
from slime_core.types.batch import TokenColumns
from slime_core.types.buffer_item import BufferItem, ItemKind
from slime_core.types.completion import SamplingParams
from slime_core.types.sample import SampleGroup, Status
from slime_plugin_kit.groups import group_of
from slime_plugin_kit.scripted_engine import ScriptedEngine
from slime_plugin_kit.scripted_rollout import (
    BUDGET,
    NumberedPrompts,
    client_of,
    episode_of,
    prompt_of,
    tokenizer,
    vocab_size,
)
from slime_sources.rendering.prompt_renderer import PromptRenderer

GROUPS, SAMPLES = 2, 3


class Scored(SingleTurn):
    """Rewards by position, so that a run needs no reward process."""

    async def generate(self, episode):
        (sample,) = await super().generate(episode)
        return [replace(sample, reward=float(episode.index % SAMPLES), metadata={"row": episode.prompt.group_index})]


class Step:
    """A step of a run with a scripted engine."""

    def __init__(self):
        self.source = NumberedPrompts()
        self.buffer = DataBuffer(self.source, PopFirstFilter())
        self.observed = []
        self.context = RolloutContext(
            config=RolloutConfig(
                rollout_batch_size=GROUPS, n_samples_per_prompt=SAMPLES, rollout_max_response_len=BUDGET
            ),
            data=DataConfig(apply_chat_template=True),
            tokenizer=tokenizer(),
            buffer=self.buffer,
            runner=GroupRunner(
                GroupSettings(
                    scope="train",
                    num_samples=SAMPLES,
                    sampling=SamplingParams(max_new_tokens=BUDGET),
                    seed=3,
                    max_context_len=None,
                    scoring=None,
                    evaluation=False,
                    max_retries=0,
                ),
                generator=Scored(),
                client=client_of(ScriptedEngine(vocab_size=vocab_size())),
                tokenizer=tokenizer(),
                rewards=None,
                on_failure=lambda failure: None,
            ),
            filters=(),
            observe=lambda step, accepted, rejected: self.observed.append((accepted, rejected)),
        )

    def collect(self, folder, **options):
        async def run():
            collector = CompatCollector.build(CompatCollector.Config(python_path=(folder,), **options))
            return await collector.collect(0, self.context)

        return asyncio.run(run())


HOOKS = """
    import torch
    from slime.rollout.base_types import RolloutFnTrainOutput
    from slime.rollout.sglang_rollout import GenerateState, generate_and_rm_group
    from slime.utils.async_utils import run
    from slime.utils.http_utils import post
    from slime.utils.types import Sample

    def mask_losers(args, groups):
        for group in groups:
            for sample in group:
                sample.remove_sample = sample.get_reward_value(args) == 0

    def process(args, groups, data_source):
        args.seen.append([[sample.index for sample in group] for group in groups])

    def draws(args, groups, data_source):
        data_source.get_samples(1)

    def normalize(args, samples):
        raw = [sample.get_reward_value(args) for sample in samples]
        best = max(raw)
        return raw, [reward / best for reward in raw]

    def too_few(args, samples):
        return [1.0], [1.0]

    def teacher(args, samples):
        for sample in samples:
            sample.teacher_log_probs = [0.0] * sample.response_length
        return [0.0] * len(samples), [0.0] * len(samples)

    def convert(args, samples):
        kept = [sample for sample in samples if sample.reward]
        return {
            "tokens": [sample.tokens[:-1] for sample in kept],
            "response_lengths": [sample.response_length - 1 for sample in kept],
            "rewards": [sample.reward * 10 for sample in kept],
            "raw_reward": [sample.reward for sample in kept],
            "truncated": [0] * len(kept),
            "sample_indices": [sample.index for sample in kept],
            "loss_masks": [sample.loss_mask[:-1] for sample in kept],
        }

    def convert_images(args, samples):
        return convert(args, samples) | {"multimodal_train_inputs": [None] * len(samples), "pixels": [1]}

    async def best_of_four(args, data_source):
        state = GenerateState(args)
        groups = data_source.get_samples(4)
        done = [await generate_and_rm_group(args, group, state.sampling_params.copy()) for group in groups[:3]]
        data_source.add_samples(groups[3:])
        for sample in done[2]:
            sample.metadata["chosen"] = True
        return RolloutFnTrainOutput(samples=[done[2], done[0]], metrics={"rollout/chosen": 2})

    def rollout(args, rollout_id, data_source, evaluation=False):
        assert not evaluation and rollout_id == 0
        return run(best_of_four(args, data_source))

    async def ask(args, sample):
        state = GenerateState(args)
        ids = state.tokenizer.encode(sample.prompt, add_special_tokens=False)
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
        out = await post(url, {"input_ids": ids, "sampling_params": state.sampling_params, "return_logprob": True})
        meta = out["meta_info"]
        sample.tokens = list(ids)
        sample.append_response_tokens(
            args,
            tokens=[item[1] for item in meta["output_token_logprobs"]],
            log_probs=[item[0] for item in meta["output_token_logprobs"]],
            meta_info=meta,
            text=out["text"],
        )
        sample.reward = 1.0
        return sample

    def by_requests(args, rollout_id, data_source, evaluation=False):
        groups = data_source.get_samples(args.rollout_batch_size)
        return [[run(ask(args, sample)) for sample in group] for group in groups]

    def too_many(args, rollout_id, data_source, evaluation=False):
        return [[], [], []]

    def raises(args, rollout_id, data_source, evaluation=False):
        data_source.get_samples(2)
        raise RuntimeError("no service")

    def warmer(args, rollout_id, data_source, evaluation=False):
        (group,) = data_source.get_samples(1)
        run(generate_and_rm_group(args, group, {"temperature": 2.0}))

    async def hook(args, sample, evaluation=False):
        sample.metadata["hooked"] = [args.mark, evaluation]

    def of_step(args, sample, rollout_id=None):
        pass
"""


@pytest.fixture
def folder(write_module):
    return write_module("old_hooks", HOOKS)


def rewards(groups):
    return [[sample.reward for sample in group.samples] for group in groups]


def test_a_sample_filter_and_a_function_of_all_samples(folder):
    step = Step()
    seen = []
    groups = step.collect(
        folder,
        rollout_sample_filter_path="old_hooks.mask_losers",
        rollout_all_samples_process_path="old_hooks.process",
        args={"seen": seen},
    )
    assert [[sample.remove_sample for sample in group.samples] for group in groups] == [[True, False, False]] * 2
    plain = Step().collect(folder, rollout_all_samples_process_path="old_hooks.process", args={"seen": seen})
    for group, other in zip(groups, plain, strict=True):
        for sample, same in zip(group.samples, other.samples, strict=True):
            assert np.array_equal(sample.tokens, same.tokens)
            assert sample.spans == same.spans
    assert step.observed == [(groups, [])]
    with pytest.raises(RolloutError, match=r"data_source.get_samples is not available, since the step is complete"):
        Step().collect(folder, rollout_all_samples_process_path="old_hooks.draws")


def test_rewards_are_post_processed_for_the_whole_step(folder):
    groups = Step().collect(folder, reward_post_process_path="old_hooks.normalize")
    assert rewards(groups) == [[0.0, 0.5, 1.0]] * 2
    assert groups[0].samples[2].reward_parts == {"raw_reward": 2.0}
    with pytest.raises(RolloutError, match=r"must return two lists, .* with 6 numbers each"):
        Step().collect(folder, reward_post_process_path="old_hooks.too_few")
    with pytest.raises(RolloutError, match=r"has teacher_log_probs, .* engines.teacher"):
        Step().collect(folder, reward_post_process_path="old_hooks.teacher")


def test_a_conversion_leaves_out_samples_and_tokens(folder):
    groups = Step().collect(folder, convert_samples_to_train_data_path="old_hooks.convert")
    plain = Step().collect(folder, reward_post_process_path="old_hooks.normalize")
    assert rewards(groups) == [[10.0, 20.0]] * 2
    for group, other in zip(groups, plain, strict=True):
        for sample, whole in zip(group.samples, other.samples[1:], strict=True):
            assert np.array_equal(sample.tokens, whole.tokens[:-1])
            assert np.array_equal(sample.rollout_log_probs, whole.rollout_log_probs[:-1])
            assert sum(end - start for _, start, end in sample.spans) == sample.response_length
            assert sample.status is Status.COMPLETED
    with pytest.raises(RolloutError, match="columns multimodal_train_inputs, pixels cannot be trained"):
        Step().collect(folder, convert_samples_to_train_data_path="old_hooks.convert_images")


def test_a_rollout_function_generates_groups_as_the_run_does(folder):
    step = Step()
    groups = step.collect(folder, rollout_function_path="old_hooks.rollout")
    expected = Step().collect(folder, reward_post_process_path="old_hooks.normalize")[0]
    assert [group.group_index for group in groups] == [2, 0]
    for sample, same in zip(groups[1].samples, expected.samples, strict=True):
        assert np.array_equal(sample.tokens, same.tokens)
        assert np.array_equal(sample.rollout_log_probs, same.rollout_log_probs)
        assert sample.spans == same.spans
    assert groups[0].samples[0].metadata == {"row": 2, "chosen": True}
    ((accepted, rejected),) = step.observed
    assert accepted == groups
    assert [(group.group_index, reason) for group, reason in rejected] == [(1, "rollout_function")]
    assert [item.prompt.group_index for item in step.buffer.items] == [3]
    assert step.context.counts["rollout/chosen"] == 2


def test_a_rollout_function_that_sends_requests_itself(folder):
    groups = Step().collect(folder, rollout_function_path="old_hooks.by_requests")
    assert [len(group.samples) for group in groups] == [SAMPLES] * GROUPS
    for sample in (sample for group in groups for sample in group.samples):
        assert np.array_equal(sample.rollout_log_probs, -0.125 * (1 + sample.response_tokens % 7).astype(np.float32))
        assert sample.spans[0].version == 7
        assert sample.reward == 1.0


@pytest.mark.parametrize(
    ("name", "error", "expected"),
    [
        ("too_many", RolloutError, r"returned 3 groups, and a step has 2 \(--rollout-batch-size\)"),
        ("raises", RuntimeError, "no service"),
        ("warmer", RolloutError, "it changed sampling_params temperature before generate_and_rm_group"),
        ("hook", PluginError, r"it is a coroutine|is called as"),
    ],
)
def test_a_rollout_function_that_fails_is_reported_and_loses_no_prompt(folder, name, error, expected):
    step = Step()
    with pytest.raises(error, match=expected):
        step.collect(folder, rollout_function_path=f"old_hooks.{name}")
    waiting = [item.prompt.group_index for item in step.buffer.items]
    assert waiting == list(range(step.source.num_drawn))


def test_sample_hooks_follow_the_generate_function(folder):
    def generator(path):
        config = CompatGenerator.Config(
            path="slime_compat.written_before.generate",
            sample_hook_paths=(f"old_hooks.{path}",),
            python_path=(folder,),
            args={"mark": 5},
        )
        return CompatGenerator.build(config)

    episode = episode_of(client_of(ScriptedEngine(vocab_size=vocab_size())))
    (sample,) = asyncio.run(generator("hook").generate(episode))
    assert sample.metadata["hooked"] == [5, False]
    with pytest.raises(PluginError, match="it takes rollout_id, which a response does not have"):
        generator("of_step")


# --- batches ----------------------------------------------------------------------------------------------------------

MASKS = ((1, 1, 0), (1,))
BATCH_HOOKS = """
    import torch

    def halved(args, rollout_data):
        assert rollout_data["total_lengths"] == [n + p for n, p in zip(rollout_data["response_lengths"], args.prompts)]
        rollout_data["advantages"] = [
            torch.full_like(kl, reward / 2) - log_probs - kl
            for reward, kl, log_probs in zip(rollout_data["rewards"], rollout_data["kl"], rollout_data["log_probs"])
        ]
        rollout_data["returns"] = [torch.zeros(len(kl)) for kl in rollout_data["kl"]]

    def reads_reference(args, rollout_data):
        rollout_data["ref_log_probs"]

    def too_short(args, rollout_data):
        rollout_data["advantages"] = rollout_data["returns"] = [torch.zeros(3), torch.zeros(2)]

    def veto(args, *, pg_loss, train_log_probs, rollout_log_probs, loss_masks, **rest):
        ratio = torch.exp(torch.cat(train_log_probs) - torch.cat(rollout_log_probs))
        masks = [mask * (ratio[:len(mask)] < 100) for mask in loss_masks]
        masks[1] = masks[1] * 0
        return pg_loss * ratio, masks, {"ratio": ratio}

    def adds(args, *, pg_loss, loss_masks, **rest):
        return pg_loss + 1, loss_masks, {}

    def by_constant(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
        return lambda loss: (loss * torch.cat(loss_masks)).sum() / 8

    def by_micro_batch(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
        return lambda loss: loss.sum() / sum(response_lengths)

    def squares(total_lengths, response_lengths, loss_masks, calculate_per_token_loss=False):
        return lambda loss: (loss ** 2).sum()
"""


@pytest.fixture
def batch_folder(write_module):
    return write_module("batch_hooks", BATCH_HOOKS)


def batch_of(*rewards):
    from slime_plugin_kit.groups import group_of

    group = group_of(("abc", "d"))
    samples = []
    for sample, mask, reward in zip(group.samples, MASKS, rewards, strict=True):
        end = sample.prompt_length + len(mask)
        tokens = np.resize(sample.tokens, end).astype(np.int32)
        samples.append(
            replace(
                sample,
                tokens=tokens,
                loss_mask=np.array(mask, np.uint8),
                rollout_log_probs=np.full(len(mask), -1, np.float32),
                spans=(),
                status=Status.COMPLETED,
                reward=reward,
            )
        )
    return build_batch([SampleGroup(prompt=group.prompt, samples=tuple(samples))])


OLD = np.array([-1.0, -0.5, -3.0, -1.0], np.float32)


def test_a_function_of_advantages_gets_upstreams_columns(batch_folder):
    batch = batch_of(1.0, 3.0)

    def estimate(name, penalty=None):
        args = {"prompts": batch.prompt_length.tolist(), "kl_coef": 0.5}
        config = CompatAdvantage.Config(path=f"batch_hooks.{name}", python_path=(batch_folder,), args=args)
        columns = TokenColumns(old_log_probs=OLD)
        inputs = CreditInputs(batch=batch, rewards=batch.reward, columns=columns, kl_penalty=penalty)
        return CompatAdvantage.build(config).estimate(inputs)

    assert estimate("halved").advantages.tolist() == [1.5, 1.0, 3.5, 2.5]
    penalised = estimate("halved", np.full(4, 0.25, np.float32))
    # kl is the estimate alone, without the coefficient: 0.25 / 0.5.
    assert penalised.advantages.tolist() == [1.0, 0.5, 3.0, 2.0]
    assert penalised.returns.tolist() == [0.0] * 4
    with pytest.raises(KeyError, match=r"the batch has no ref_log_probs: name the advantage .*compat_ref"):
        estimate("reads_reference")
    with pytest.raises(ValueError, match=r"advantages of sample \d+ has 2 numbers; its response has 1 tokens"):
        estimate("too_short")


def test_a_tis_function_gives_weights_and_rejections(batch_folder):
    batch = batch_of(1.0, 3.0)

    def correct(name):
        config = CompatCorrection.Config(path=f"batch_hooks.{name}", python_path=(batch_folder,))
        return CompatCorrection.build(config).correct_batch(batch, TokenColumns(old_log_probs=OLD))

    found = correct("veto")
    assert found.weights == pytest.approx([1.0, np.exp(0.5), 0.0, 1.0])
    assert found.keep.tolist() == [True, True, False, False]
    assert found.metrics["ratio"] == pytest.approx(np.exp(OLD + 1))
    with pytest.raises(ValueError, match="it does not multiply the loss by a weight"):
        correct("adds")


@pytest.mark.parametrize("aggregation", ["seq_mean", "token_mean"])
def test_a_reducer_gives_the_loss_that_upstream_reduces_so(batch_folder, aggregation):
    """The loss is the sum of the reducer over the step, divided by its rollouts (by its tokens, per token)."""
    batch = batch_of(1.0, 3.0)
    config = CompatReducer.Config(path="batch_hooks.by_constant", python_path=(batch_folder,), aggregation=aggregation)
    rules = AdvantageConfig(
        advantage=None,
        corrections=[(CompatReducer.build(config), CompatReducer.needs)],
        aggregation=Aggregation(aggregation),
        rollouts_per_step=2,
        max_response_len=8,
    )
    columns = compute_advantages_and_returns(batch, TokenColumns(), rules).columns
    losses = np.array([2.0, -1.0, 50.0, 4.0])
    divisor = 2 if aggregation == "seq_mean" else 3
    expected = (2.0 - 1.0 + 4.0) / 8 / divisor
    assert float((columns.loss_weight * columns.correction * losses).sum()) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("name", "expected"),
    [("by_micro_batch", "depends on which others are in its micro-batch"), ("squares", "no weighted sum")],
)
def test_a_reducer_that_is_no_weight_of_tokens_is_refused(batch_folder, name, expected):
    config = CompatReducer.Config(path=f"batch_hooks.{name}", python_path=(batch_folder,))
    with pytest.raises(ValueError, match=expected):
        CompatReducer.build(config).correct_batch(batch_of(1.0, 3.0), TokenColumns())


# --- data -------------------------------------------------------------------------------------------------------------

DATA_HOOKS = """
    import json, os
    from slime.rollout.data_source import DataSource
    from slime.utils.types import Sample

    class Squares(DataSource):
        def __init__(self, args):
            self.args, self.n = args, args.first

        def get_samples(self, num_samples):
            self.n += num_samples
            numbers = range(self.n - num_samples, self.n)
            return [[Sample(prompt=f"{n}*{n}=", label=str(n * n), metadata={"n": n})] * 2 for n in numbers]

        def add_samples(self, samples):
            raise AssertionError

        def save(self, rollout_id):
            os.makedirs(f"{self.args.save}/rollout", exist_ok=True)
            with open(f"{self.args.save}/rollout/{rollout_id}.json", "w") as file:
                json.dump(self.n, file)

        def load(self, rollout_id=None):
            with open(f"{self.args.load}/rollout/{rollout_id}.json") as file:
                self.n = json.load(file)

        def __len__(self):
            return 100

    class Forgets(Squares):
        def save(self, rollout_id):
            pass

    class Mixed(Squares):
        def get_samples(self, num_samples):
            return [[Sample(prompt="1"), Sample(prompt="2")]]

    def get_samples(args):
        pass

    def most_samples(args, rollout_id, buffer, num_samples):
        assert rollout_id is None
        best = sorted(buffer, key=lambda group: -group[0].group_index)[:num_samples]
        for group in best:
            buffer.remove(group)
        return best

    def drops(args, rollout_id, buffer, num_samples):
        buffer.pop()
        return []

    def makes(args, rollout_id, buffer, num_samples):
        return [[Sample()]]
"""


@pytest.fixture
def data_folder(write_module):
    return write_module("data_hooks", DATA_HOOKS)


def source_of(folder, name="Squares", **args):
    config = CompatSource.Config(path=f"data_hooks.{name}", python_path=(folder,), args={"first": 3} | args)
    return CompatSource.build(config)(PromptRenderer(tokenizer=tokenizer()), seed=0)


def test_a_source_continues_from_its_files(data_folder):
    source = source_of(data_folder)
    first = source.take(2)
    assert [(p.group_index, p.text, p.label, p.metadata) for p in first] == [
        (0, "3*3=", "9", {"n": 3}),
        (1, "4*4=", "16", {"n": 4}),
    ]
    state = json.loads(json.dumps(source.state()))
    after = [(p.group_index, p.text) for p in source.take(2)]
    other = source_of(data_folder)
    other.restore(state)
    assert [(p.group_index, p.text) for p in other.take(2)] == after == [(2, "5*5="), (3, "6*6=")]
    with pytest.raises(PluginError, match=r"wrote no file below args.save"):
        source_of(data_folder, "Forgets").state()
    with pytest.raises(PluginError, match="the samples of a group have different prompts"):
        source_of(data_folder, "Mixed").take(1)
    with pytest.raises(PluginError, match=r"it is a function. It must be a class"):
        source_of(data_folder, "get_samples")


def test_a_buffer_filter_chooses_and_loses_no_prompt(data_folder):
    items = [BufferItem(prompt=prompt_of(number), kind=ItemKind.RETURNED, start_rollout_id=2) for number in range(4)]

    def select(name):
        config = CompatBufferFilter.Config(path=f"data_hooks.{name}", python_path=(data_folder,))
        return CompatBufferFilter.build(config).select(
            items, 2, Versions(trained=0, max_staleness=0, oldest=(None,) * 4)
        )

    assert select("most_samples") == [3, 2]
    with pytest.raises(RolloutError, match=r"removed groups \[3\] from the buffer and did not return them"):
        select("drops")
    with pytest.raises(RolloutError, match="must return groups of the buffer"):
        select("makes")


# --- replacements of modules ------------------------------------------------------------------------------------------


def test_a_sample_gets_the_response_of_a_model_and_of_a_tool():
    sample = Sample(tokens=[1, 2])
    reply = {"finish_reason": {"type": "length"}, "weight_version": "4", "cached_tokens": 1, "prompt_tokens": 2}
    kept = {"top_p_token_ids": torch.tensor([5, 6, 7]), "top_p_token_offsets": [0, 1, 3]}
    sample.append_response_tokens(tokens=[5, 6], log_probs=[-1, -2], meta_info=reply | kept, text="ab")
    sample.append_response_tokens(tokens=torch.tensor([9]), trainable=False, text="t")
    assert (sample.tokens, sample.response, sample.response_length) == ([1, 2, 5, 6, 9], "abt", 3)
    assert (sample.loss_mask, sample.rollout_log_probs) == ([1, 1, 0], [-1.0, -2.0, 0.0])
    assert sample.rollout_top_p_token_offsets.tolist() == [0, 1, 3, 3]
    assert (sample.status, sample.weight_versions) == (Sample.Status.TRUNCATED, ["4"])
    assert sample.prefix_cache_info.prefix_cache_hit_rate == 0.5
    copy = Sample.from_dict(sample.to_dict() | {"own": 3})
    assert copy.own == 3
    assert copy.to_dict().keys() - sample.to_dict().keys() == {"own"}
    with pytest.raises(ValueError, match="trainable response tokens require"):
        sample.append_response_tokens(tokens=[1])
    sample.rollout_log_probs = None
    with pytest.raises(ValueError, match="response tokens before them have no rollout_log_probs"):
        sample.append_response_tokens(tokens=[1], log_probs=[-1.0])


def test_experts_of_a_partial_response_are_joined():
    class Args:
        num_layers, moe_router_topk = 2, 1

    sample = Sample(tokens=[1, 2])
    first = torch.arange(4, dtype=torch.int32)
    sample.append_response_tokens(Args, tokens=[3], log_probs=[0.0], meta_info={"routed_experts": first})
    more = {"routed_experts": torch.tensor([7, 8]), "routed_experts_start_len": 2}
    sample.append_response_tokens(Args, tokens=[4], log_probs=[0.0], meta_info=more)
    assert sample.rollout_routed_experts.tolist() == [[[0], [1]], [[2], [3]], [[7], [8]]]
    with pytest.raises(
        ValueError, match="routed experts: 3 numbers from token 0, but a sample of 4 tokens needs 3 x 2"
    ):
        sample.append_response_tokens(Args, meta_info={"routed_experts": [1, 2, 3]})


HUB = """
    from slime.rollout import rm_hub
    from slime.rollout.rm_hub import batched_async_rm
    from slime.rollout.rm_hub.math_dapo_utils import compute_score

    async def by_type(args, samples):
        rewards = await batched_async_rm(args, samples)
        assert [await rm_hub.async_rm(args, sample) for sample in samples] == rewards
        return rewards

    async def strict(args, sample):
        return compute_score(sample.response, sample.label, strict_box_verify=True)
"""


def test_functions_score_by_the_type_in_the_args_or_in_the_metadata(write_module):
    folder = write_module("old_hub", HUB)
    # Truncated: without the end token, which upstream's responses keep.
    responses = ("Answer: \\boxed{4}", "Answer: 04", "\\boxed{3} Answer: 3", "4")
    group = group_of(responses, statuses=[Status.TRUNCATED] * 4)
    prompt = replace(group.prompt, label="4", metadata={})
    group = replace(group, prompt=prompt, samples=tuple(replace(s, prompt=prompt) for s in group.samples))

    def scores(name, metadata, **options):
        of = replace(group, samples=tuple(replace(s, metadata=metadata) for s in group.samples))
        config = CompatReward.Config(path=f"old_hub.{name}", python_path=(folder,), **options)
        return CompatReward.build(config).score(of)

    dapo = [value["score"] for value in scores("by_type", {}, group=True, args={"rm_type": "dapo"})]
    assert dapo == [1, 1, -1, -1]
    # The row's own type is preferred.
    assert scores("by_type", {"rm_type": "math"}, group=True, args={"rm_type": "dapo"}) == [1, 0, 0, 0]
    # Only the text of the last box counts.
    assert [value["score"] for value in scores("strict", {})] == [1, -1, -1, -1]
    with pytest.raises(RewardError, match="rm_type"):
        scores("by_type", {}, group=True, args={"rm_type": "maths"})


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("from slime.utils.http_utils import run_router", "run_router is not provided by slime-compat, which has get"),
        (
            "from slime.agent.sandbox import E2BSandbox",
            "slime.agent is a module of upstream slime, which is not installed",
        ),
        (
            "from slime.rollout.rm_hub import grade_answer_verl",
            "grade_answer_verl is not provided by slime-compat, which has async_rm, batched_async_rm",
        ),
        ("import slime.rollout.rm_hub.f1", "slime.rollout.rm_hub.f1 is a module of upstream slime"),
    ],
)
def test_what_the_stand_in_lacks_is_named(write_module, line, expected):
    folder = write_module("old_imports", line)
    build = CompatSource.build(CompatSource.Config(path="old_imports.Any", python_path=(folder,)))
    with pytest.raises(PluginError, match=expected):
        build(PromptRenderer(tokenizer=tokenizer()), seed=0)
