"""Functions as they were written for another slime, called by this one."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from dataclasses import replace

import httpx
import numpy as np
import pytest
from pydantic import ValidationError

from slime_compat.plugin import CompatFilter, CompatGenerator, CompatReward
from slime_core.errors import PluginError, RewardError, RolloutError
from slime_core.rollout.groups import check_samples
from slime_core.types.sample import Status
from slime_plugin_kit.groups import END, group_of
from slime_plugin_kit.scripted_engine import ScriptedEngine
from slime_plugin_kit.scripted_rollout import client_of, episode_of, vocab_size

REWARDS = """
    from slime.utils.types import Sample

    async def by_sample(args, sample, **kwargs):
        assert sample.status == Sample.Status.COMPLETED and isinstance(sample, Sample)
        sample.metadata["seen"] = True
        return args.bonus + len(sample.response)

    async def named(args, sample):
        return {"score": len(sample.response), "ok": True, "pred": sample.response}

    def by_group(args, samples, **kwargs):
        longest = max(len(sample.response) for sample in samples)
        return [float(len(sample.response) == longest) for sample in samples]

    def by_text(prompt, response, label=None, **kwargs):
        return float(response == label)

    def of_nothing():
        return 1.0

    class Model:
        pass

    async def nothing(args, sample):
        pass
"""


def reward(folder, path, **options):
    config = CompatReward.Config(path=path, python_path=(folder,), **options)
    return CompatReward.build(config)


def test_rewards_of_every_form(write_module):
    folder = write_module("old_rewards", REWARDS)
    group = group_of(("4", "four", ""))
    group = replace(group, samples=tuple(replace(s, status=Status.COMPLETED, metadata={}) for s in group.samples))
    # As upstream, an old sample's text has the end token.
    end = len(END)
    assert reward(folder, "old_rewards.by_sample", args={"bonus": 10}).score(group) == [11 + end, 14 + end, 10]
    assert "seen" not in group.samples[0].metadata
    assert reward(folder, "old_rewards.named").score(group)[1] == {"score": 4.0 + end, "ok": 1.0}
    assert reward(folder, "old_rewards.by_group", group=True).score(group) == [0.0, 1.0, 0.0]
    labelled = replace(group, samples=tuple(replace(s, prompt=replace(s.prompt, label="four")) for s in group.samples))
    assert reward(folder, "old_rewards.by_text").score(labelled) == [0.0, 1.0, 0.0]


def test_missing_args_are_named_and_args_are_read_only(write_module):
    group = group_of(("4",))
    folder = write_module(
        "old_rewards", "async def f(args, sample): return args.bonus\ndef g(args, sample): args.x = 1"
    )
    with pytest.raises(AttributeError, match=r'args has no "bonus". Set reward.args.bonus in the run file. Listed: b.'):
        reward(folder, "old_rewards.f", args={"b": 1}).score(group)
    with pytest.raises(AttributeError, match=r"args.x is read-only"):
        reward(folder, "old_rewards.g").score(group)


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("old_reward.by_sample", r'no module "old_reward" .*close match: old_rewards'),
        ("old_rewards.by_sampel", r'has no "by_sampel"; close match: by_sample'),
        ("old_rewards.py", r"This is the path of a file, not of a function. Set it to old_rewards.FUNCTION"),
        ("by_sample", r"package.module.function"),
        ("old_rewards.Model", r"it is a class. It must be a function"),
        ("old_rewards.of_nothing", r"it takes \(\), and is called as \(args, sample\) or \(prompt, response, label\)"),
        ("needs_more.f", r"needs_more cannot be imported: No module named 'not_installed_here'"),
        ("needs_slime.f", r"slime-compat only replaces .*slime.utils.types"),
    ],
)
def test_an_unresolved_path_is_reported_with_what_there_is(write_module, path, expected):
    folder = write_module("old_rewards", REWARDS)
    write_module("needs_more", "import not_installed_here")
    write_module("needs_slime", "from slime.backends.megatron_utils import initialize")
    with pytest.raises(PluginError, match=f'reward.path = "{path}": .*{expected}'):
        reward(folder, path)


def test_a_reward_that_returns_none_is_reported(write_module):
    folder = write_module("old_rewards", REWARDS)
    with pytest.raises(RewardError, match="returned None"):
        reward(folder, "old_rewards.nothing").score(
            replace(group_of(("4",)), samples=(replace(group_of(("4",)).samples[0], status=Status.COMPLETED),))
        )
    with pytest.raises(RewardError, match="it must return a list"):
        reward(folder, "old_rewards.nothing", group=True).score(group_of(("4",)))


FILTERS = """
    from slime.rollout.filter_hub.base_types import DynamicFilterOutput

    def unequal(args, samples, **kwargs):
        rewards = [sample.get_reward_value(args) for sample in samples]
        return DynamicFilterOutput(keep=len(set(rewards)) > 1, reason=f"all equal {rewards[0]}")

    def short(args, samples):
        for sample in samples:
            sample.remove_sample = sample.reward == 0
        return len(samples) < 3

    def silent(args, samples):
        pass
"""


def test_filters_keep_drop_and_mark(write_module):
    folder = write_module("old_filters", FILTERS)

    def decide(path, *rewards):
        group = group_of(tuple("abc"[: len(rewards)]))
        group = replace(group, samples=tuple(replace(s, reward=r) for s, r in zip(group.samples, rewards, strict=True)))
        return CompatFilter.build(CompatFilter.Config(path=path, python_path=(folder,))).decide(group)

    assert decide("old_filters.unequal", 0.0, 1.0).keep
    equal = decide("old_filters.unequal", 1.0, 1.0)
    assert (equal.keep, equal.reason) == (False, "all_equal_1.0")
    assert decide("old_filters.short", 0.0, 1.0).masked_indices == (0,)
    assert decide("old_filters.short", 0.0, 1.0, 1.0).reason == "short"
    with pytest.raises(RolloutError, match="it returned None"):
        decide("old_filters.silent", 1.0)


GENERATORS = """
    import copy
    from slime.rollout.sglang_rollout import GenerateState
    from slime.utils.http_utils import post
    from slime.utils.types import Sample

    async def ask(args, ids, params):
        url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
        out = await post(url, {"input_ids": ids, "sampling_params": params, "return_logprob": True})
        return [item[1] for item in out["meta_info"]["output_token_logprobs"]], out

    async def two_turns(args, sample, sampling_params):
        # Neither log-probs nor versions are kept, as many old functions do.
        state = GenerateState(args)
        prompt = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
        params = sampling_params | {"max_new_tokens": 2}
        first, _ = await ask(args, prompt, params)
        tool = state.tokenizer(args.tool_text, add_special_tokens=False)["input_ids"]
        second, out = await ask(args, prompt + first + tool, params)
        sample.tokens = prompt + first + tool + second
        sample.loss_mask = [1] * len(first) + [0] * len(tool) + [1] * len(second)
        sample.response_length = len(sample.loss_mask)
        sample.response = out["text"]
        sample.status = Sample.Status.TRUNCATED
        twin = copy.deepcopy(sample)
        twin.reward = {"acc": 0.5}
        return [sample, twin]

    async def text_again(args, sample, sampling_params):
        state = GenerateState(args)
        prompt = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
        sample.tokens = prompt + [5, 6]
        sample.response_length = 2
        return sample

    async def of_lists(args, samples, evaluation=False):
        for sample in samples:
            sample.tokens = [1, 2, 3]
            sample.response = str(evaluation)
            sample.response_length = 0
        return samples

    async def wrong_lengths(args, sample, sampling_params):
        sample.tokens, sample.response_length, sample.loss_mask = [1, 2, 3], 2, [1]
        return sample

    async def asks_elsewhere(args, sample, sampling_params):
        await post(f"http://{args.sglang_router_ip}:{args.sglang_router_port}/abort_request", {})

    def blocks(args, sample, sampling_params):
        return sample

    async def of_two(args, sample):
        return sample
"""


def generate(folder, name, **options):
    async def scene():
        engine = ScriptedEngine(vocab_size=vocab_size())
        config = CompatGenerator.Config(path=f"old_generators.{name}", python_path=(folder,), **options)
        generator = CompatGenerator.build(config)
        return check_samples(await generator.generate(episode_of(client_of(engine))), generator), engine

    return asyncio.run(scene())


def test_log_probs_and_versions_are_the_engines_though_the_function_kept_none(write_module):
    folder = write_module("old_generators", GENERATORS)
    (sample, twin), engine = generate(folder, "two_turns", args={"tool_text": "1+1", "reward_key": "acc"})
    expected = np.concatenate([completion.log_probs for completion in engine.completions])
    assert len(expected) > 1
    assert np.array_equal(sample.rollout_log_probs[sample.loss_mask == 1], expected)
    assert 0 < (sample.loss_mask == 0).sum() < sample.response_length
    assert not sample.rollout_log_probs[sample.loss_mask == 0].any()
    covered = {place for _, start, end in sample.spans for place in range(start, end)}
    assert covered == set(np.flatnonzero(sample.loss_mask).tolist())
    assert (sample.status, sample.reward) == (Status.TRUNCATED, None)
    assert (twin.reward, twin.reward_parts, twin.rollout_id) == (0.5, {"acc": 0.5}, sample.rollout_id)


def test_trained_text_that_no_engine_wrote(write_module):
    folder = write_module("old_generators", GENERATORS)
    with pytest.raises(
        RolloutError, match=r"trains 2 response tokens, the first at 0, that no engine generated.*missing_log"
    ):
        generate(folder, "text_again")
    (sample,), _ = generate(folder, "text_again", missing_log_probs="zero")
    assert sample.rollout_log_probs.tolist() == [0, 0]
    assert tuple(sample.spans[0])[1:] == (0, 2)
    assert sample.status is Status.COMPLETED


def test_functions_of_lists_get_a_list_of_one_and_the_evaluation_flag(write_module):
    (sample,), _ = generate(write_module("old_generators", GENERATORS), "of_lists")
    assert sample.response == "False"
    assert sample.prompt.token_ids.tolist() == sample.tokens.tolist() == [1, 2, 3]


@pytest.mark.parametrize(
    ("name", "error", "expected"),
    [
        ("wrong_lengths", RolloutError, "has a loss_mask of 1 and response_length 2"),
        ("asks_elsewhere", RolloutError, "called /abort_request of the router; only /generate is served"),
        ("blocks", PluginError, r"it is no coroutine \(async def\)"),
        ("of_two", PluginError, r"it takes \(args, sample\), and is called as \(args, sample, sampling_params\)"),
    ],
)
def test_invalid_generate_functions_are_refused(write_module, name, error, expected):
    with pytest.raises(error, match=expected):
        generate(write_module("old_generators", GENERATORS), name)


ASKING_OTHERS = """
    from slime.utils.http_utils import get, post

    async def judged(args, sample):
        return await post(args.url, {"text": sample.response}, max_retries=1)

    async def helped(args, sample, sampling_params):
        return await post(args.url, {"text": sample.prompt}, max_retries=1)
"""


def completed():
    return replace(group_of(("4",)), samples=(replace(group_of(("4",)).samples[0], status=Status.COMPLETED),))


@pytest.fixture
def silent_url():
    """URL of a server that accepts connections and never responds."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/tool"


def test_a_request_to_a_server_that_is_silent_has_an_end(write_module, silent_url):
    folder = write_module("old_generators", ASKING_OTHERS)
    options = {"args": {"url": silent_url}, "request_timeout": 0.2}
    expected = f"POST {silent_url}: no response within 0.2 s, 1 attempts"
    with pytest.raises(httpx.TimeoutException, match=rf"{expected} \(reward.request_timeout\)"):
        reward(folder, "old_generators.judged", **options).score(completed())
    with pytest.raises(httpx.TimeoutException, match=rf"{expected} \(generate.request_timeout\)"):
        generate(folder, "helped", **options)


def test_a_filter_has_no_limit_of_requests():
    """A filter cannot wait for a request, and its threads do not inherit a limit."""
    with pytest.raises(ValidationError, match="request_timeout"):
        CompatFilter.Config(path="any.keep", request_timeout=1.0)


def test_a_response_that_drips_has_an_end(write_module, monkeypatch):
    gone = asyncio.Event()
    ahead = 0

    async def drip(reader, writer):
        nonlocal ahead
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\n")
        with contextlib.suppress(ConnectionError):
            for _ in range(500):
                writer.write(b"x-more: 1\r\n")
                await writer.drain()
                # Moves the clock of the caller: a short limit could end before the first byte.
                ahead += 1
                await asyncio.sleep(0.01)
        writer.close()
        gone.set()

    async def scene():
        async with await asyncio.start_server(drip, "127.0.0.1", 0) as server:
            url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
            folder = write_module("old_rewards", ASKING_OTHERS)
            old = reward(folder, "old_rewards.judged", args={"url": url}, request_timeout=30.0)
            now = old._loop.time
            monkeypatch.setattr(old._loop, "time", lambda: now() + ahead)
            with pytest.raises(httpx.TimeoutException, match=r"no response within 30 s"):
                await asyncio.to_thread(old.score, completed())
            await asyncio.wait_for(gone.wait(), 60)

    asyncio.run(scene())
