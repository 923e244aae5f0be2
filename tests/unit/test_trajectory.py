"""Trajectories and episodes: what grows together stays together, and seeds depend on what is generated alone."""

import asyncio
import random
from dataclasses import replace

import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from slime_core.errors import EngineError, RewardError
from slime_core.rollout.episode import EngineEpisode
from slime_core.rollout.partial_stop import strip_partial_stop
from slime_core.rollout.seeds import request_seed
from slime_core.rollout.single_turn import SingleTurn
from slime_core.types.completion import Completion, FinishReason, SamplingParams
from slime_core.types.prompt import Prompt
from slime_core.types.sample import SpanReward, Status, VersionSpan
from slime_core.types.trajectory import Trajectory, decode, without_untrained_end
from slime_models.new_model import character_tokenizer

PROMPT = Prompt(group_index=6, text="q", token_ids=np.array([5, 6, 7], np.int32), metadata={"kind": "x"})


class Letters:
    is_fast = False

    def decode(self, ids, skip_special_tokens):
        return "".join(chr(97 + i) for i in ids if not (skip_special_tokens and chr(97 + i) == "z"))


def completion(tokens, reason="stop", spans=None):
    tokens = np.array(tokens, np.int32)
    return Completion(
        request_id="r",
        token_ids=tokens,
        log_probs=-tokens.astype(np.float32),
        finish_reason=FinishReason(reason),
        spans=(VersionSpan(4, 0, len(tokens)),) if spans is None else tuple(VersionSpan(*span) for span in spans),
    )


def trajectory():
    return Trajectory(PROMPT, index=12, rollout_id=3, tokenizer=Letters())


def test_a_turn_that_was_kept_and_masked_is_still_the_models():
    """As a partial rollout keeps it with mask_offpolicy_in_partial_rollout; a tool's tokens come before."""
    first = trajectory()
    first.append_completion(completion([1, 2]))
    first.append_environment([8, 9])
    first.append_completion(completion([3, 4], "abort"))
    kept = first.finish()
    again = trajectory()
    again.restart_from(replace(kept, loss_mask=np.zeros_like(kept.loss_mask)))
    again.append_completion(completion([5]))
    assert again.last_turn.tolist() == [3, 4, 5]


def test_two_turns_with_a_tool_between_them():
    grown = trajectory()
    grown.append_completion(completion([1, 2], spans=[(4, 0, 1), (5, 1, 2)]))
    grown.append_environment([8, 9])
    assert grown.tokens.tolist() == [5, 6, 7, 1, 2, 8, 9]
    grown.append_completion(completion([3], "length"))
    assert grown.last_turn.tolist() == [3]
    grown.counts["searches"] += 1
    sample = grown.finish(reward=0.5, metadata={"turns": 2})
    assert sample.tokens.tolist() == [5, 6, 7, 1, 2, 8, 9, 3]
    assert sample.response_tokens.tolist() == [1, 2, 8, 9, 3]
    assert sample.loss_mask.tolist() == [1, 1, 0, 0, 1]
    assert sample.rollout_log_probs.tolist() == [-1, -2, 0, 0, -3]
    # Spans are in response tokens; the tool's belong to no version.
    assert sample.spans == ((4, 0, 1), (5, 1, 2), (4, 4, 5))
    assert sample.status is Status.TRUNCATED
    assert sample.response == "bcijd"
    assert (sample.index, sample.group_index, sample.rollout_id) == (12, 6, 3)
    assert sample.metadata == {"kind": "x", "turns": 2}
    assert sample.counts == {"searches": 1}
    assert sample.reward == 0.5
    assert (sample.loss_mask.dtype, sample.rollout_log_probs.dtype, sample.tokens.dtype) == (
        np.uint8,
        np.float32,
        np.int32,
    )


@pytest.mark.parametrize(
    ("turns", "response", "raw_response"),
    [
        (["ab"], "ab", "ab"),
        (["abz"], "ab", "abz"),
        (["z"], "", "z"),
        # The environment's text after an end token, or with special tokens around it, does not join the model's.
        (["ab", "cd", "ez"], "abcde", "abcdez"),
        (["abz", "cd", "ez"], "ab\ncde", "abzcdez"),
        (["abz", "zcdz", "ez"], "ab\ncd\ne", "abzzcdzez"),
        (["abz", "z", "ez"], "ab\ne", "abzzez"),
        (["azb", "c"], "abc", "azbc"),
    ],
)
def test_the_response_is_text_without_special_tokens(turns, response, raw_response):
    grown = trajectory()
    for number, text in enumerate(turns):
        tokens = [ord(letter) - 97 for letter in text]
        if number % 2:
            grown.append_environment(tokens)
        else:
            grown.append_completion(completion(tokens))
    sample = grown.finish()
    assert (sample.response, sample.raw_response) == (response, raw_response)
    # Equal texts are one object.
    assert (sample.response is sample.raw_response) == (response == raw_response)
    assert replace(sample, raw_response="").raw_response is sample.response


@pytest.mark.parametrize(
    "decoder", [decoders.ByteLevel(), decoders.Sequence([decoders.Strip(" ", 1, 1), decoders.ByteLevel()])]
)
def test_texts_of_a_fast_tokenizer_are_those_of_the_whole_response(decoder):
    """Whatever tokens there are: parts of characters, special tokens anywhere."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = Tokenizer(models.BPE(vocab={letter: number for number, letter in enumerate(letters)}, merges=[]))
    backend.decoder = decoder
    backend.add_special_tokens(["<end>", "<|im_start|>"])
    backend.add_tokens(["<tool>"])
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>", clean_up_tokenization_spaces=False)
    draw = random.Random(0)
    for _ in range(500):
        special = draw.random() < 0.3
        ids = [
            draw.randrange(256 if special else 0, 259) if draw.random() < 0.4 else draw.randrange(256) for _ in range(8)
        ]
        ids = ids[: draw.randrange(9)] + [256] * draw.randrange(2)
        grown = Trajectory(PROMPT, index=12, rollout_id=3, tokenizer=tokenizer)
        grown.append_completion(completion(ids))
        sample = grown.finish()
        assert (sample.response, sample.raw_response) == (
            tokenizer.decode(ids, skip_special_tokens=True),
            tokenizer.decode(ids),
        )


@pytest.mark.parametrize(
    ("reason", "status"),
    [("stop", Status.COMPLETED), ("length", Status.TRUNCATED), ("abort", Status.ABORTED)],
)
def test_the_status_follows_the_finish_reason(reason, status):
    grown = trajectory()
    grown.append_completion(completion([1], reason))
    assert grown.finish().status is status
    assert grown.finish(status=Status.FAILED).status is Status.FAILED


def test_an_empty_response():
    sample = trajectory().finish()
    assert sample.response_length == 0
    assert sample.status is Status.PENDING
    assert [len(v) for v in (sample.loss_mask, sample.rollout_log_probs, sample.response_tokens)] == [0, 0, 0]
    assert sample.tokens.tolist() == [5, 6, 7]
    grown = trajectory()
    grown.append_completion(completion([], spans=[(4, 0, 0)]))
    assert grown.finish().spans == ()


def test_continuing_from_kept_tokens():
    first = trajectory()
    first.append_completion(completion([1, 2], "abort"))
    first.append_environment([8])
    again = trajectory()
    again.restart_from(first.finish())
    again.append_completion(completion([3], spans=[(9, 0, 1)]))
    sample = again.finish()
    assert sample.tokens.tolist() == [5, 6, 7, 1, 2, 8, 3]
    assert sample.loss_mask.tolist() == [1, 1, 0, 1]
    assert sample.spans == ((4, 0, 2), (9, 3, 4))
    assert sample.status is Status.COMPLETED
    assert sample.oldest_version(99) == 4


def test_what_follows_the_last_sampled_token_is_cut():
    grown = trajectory()
    grown.append_completion(completion([1, 2]))
    grown.append_environment([8])
    grown.append_completion(completion([3]))
    whole = grown.finish()
    assert without_untrained_end(whole, Letters()) is whole
    grown.append_environment([9] * 5000)
    grown.append_completion(completion([], "length"))
    long = grown.finish()
    long = replace(long, span_rewards=(SpanReward(0, 2, 0.5), SpanReward(3, 9, 0.25), SpanReward(5, 9, 1.0)))
    sample = without_untrained_end(long, Letters())
    assert (sample.status, sample.response) == (Status.TRUNCATED, "bcid")
    for name in ("tokens", "loss_mask", "rollout_log_probs", "spans"):
        assert list(getattr(sample, name)) == list(getattr(whole, name)), name
        # No view of the long array, which would keep it in memory.
        assert getattr(getattr(sample, name), "base", None) is None
    assert sample.span_rewards == ((0, 2, 0.5), (3, 4, 0.25))


def test_what_is_sampled_or_continued_is_not_cut():
    grown = trajectory()
    grown.append_completion(completion([1, 2]))
    masked = replace(grown.finish(), loss_mask=np.array([1, 0], np.uint8))
    assert without_untrained_end(masked, Letters()) is masked
    grown.append_environment([8])
    kept = grown.finish(status=Status.ABORTED)
    assert without_untrained_end(kept, Letters()) is kept
    outside = trajectory()
    outside.append_environment([8, 9])
    whole = outside.finish(status=Status.COMPLETED)
    assert without_untrained_end(whole, Letters()) is whole


def test_a_response_whose_log_probs_do_not_fit_is_refused():
    wrong = Completion(
        request_id="train/1/0",
        token_ids=np.array([1, 2], np.int32),
        log_probs=np.array([-1], np.float32),
        finish_reason=FinishReason.STOP,
        spans=(),
    )
    with pytest.raises(EngineError, match="train/1/0: the engine responded with 2 tokens and 1 log-probs"):
        trajectory().append_completion(wrong)


# --- Episodes ---------------------------------------------------------------------------------------------------------


class Recorder:
    def __init__(self, tokens=(1, 2)):
        self.requests = []
        self.tokens = tokens

    async def generate(self, request):
        self.requests.append(request)
        return completion(list(self.tokens))


def episode(
    client, *, attempt=0, scope="train", index=12, position=4, kept=None, room=None, stop=None, budget=10, scorer=None
):
    return EngineEpisode(
        prompt=PROMPT,
        index=index,
        position=position,
        scope=scope,
        attempt=attempt,
        seed=77,
        sampling=SamplingParams(max_new_tokens=budget, temperature=0.5),
        max_context_len=room,
        client=client,
        tokenizer=Letters(),
        evaluation=False,
        stop=stop or asyncio.Event(),
        kept=kept,
        scorer=scorer,
    )


async def turns(made, count=2):
    for _ in range(count):
        await made.complete(PROMPT.token_ids)


async def test_turns_have_ids_and_seeds_of_their_own():
    client = Recorder()
    made = episode(client)
    await turns(made, 3)
    assert [r.request_id for r in client.requests] == made.request_ids == ["train/12/0", "train/12/1", "train/12/2"]
    assert len({r.seed for r in client.requests}) == 3
    assert len({r.session_id for r in client.requests}) == 1


async def test_a_retry_has_other_ids_and_the_same_seeds():
    first, again, elsewhere = Recorder(), Recorder(), Recorder()
    await turns(episode(first))
    await turns(episode(again, attempt=1))
    await turns(episode(elsewhere, scope="eval-x"))
    assert {r.request_id for r in first.requests}.isdisjoint(r.request_id for r in again.requests)
    assert [r.seed for r in first.requests] == [r.seed for r in again.requests]
    assert {r.seed for r in first.requests}.isdisjoint(r.seed for r in elsewhere.requests)


def test_seeds_are_63_bits_and_depend_on_every_part():
    seeds = {request_seed(*parts) for parts in [(1, "a", 2), (1, "a", 3), (2, "a", 2), (1, "b", 2), (1, "a", 2, 0)]}
    assert len(seeds) == 5
    assert all(0 <= seed < 2**63 for seed in seeds)
    # Pinned: another hash would make another run of every seed.
    assert request_seed(1, "train", 2, 3, 0) == PINNED


PINNED = 7605554504283807786


async def test_the_budget_is_what_the_context_leaves():
    client = Recorder()
    await episode(client, room=8).complete(PROMPT.token_ids)
    await episode(client, room=99).complete(PROMPT.token_ids)
    assert [r.sampling.max_new_tokens for r in client.requests] == [5, 10]
    assert client.requests[0].sampling.temperature == 0.5


@pytest.mark.parametrize("room", [3, 2])
async def test_no_room_is_truncated_at_once(room):
    client = Recorder()
    (sample,) = await SingleTurn().generate(episode(client, room=room))
    assert sample.status is Status.TRUNCATED
    assert sample.response_length == 0
    assert client.requests == []


async def test_a_stopped_episode_sends_no_request():
    client, stop = Recorder(), asyncio.Event()
    stop.set()
    (sample,) = await SingleTurn().generate(episode(client, stop=stop))
    assert sample.status is Status.ABORTED
    assert client.requests == []


async def test_a_single_turn_continues_with_what_is_left_of_the_budget():
    first = trajectory()
    first.append_completion(completion([1, 2, 3], "abort"))
    client = Recorder((4,))
    (sample,) = await SingleTurn().generate(episode(client, kept=first.finish()))
    assert client.requests[0].token_ids.tolist() == [5, 6, 7, 1, 2, 3]
    assert client.requests[0].sampling.max_new_tokens == 7
    assert sample.response_tokens.tolist() == [1, 2, 3, 4]
    (sample,) = await SingleTurn().generate(episode(client, kept=first.finish(), budget=3))
    assert sample.status is Status.TRUNCATED
    assert len(client.requests) == 1


async def test_an_episode_for_agents():
    """Prompts of their own, rewards before the end, and word of an abort."""
    kept = trajectory()
    kept.append_completion(completion([1, 2], "abort"))
    stop = asyncio.Event()
    made = episode(Recorder(), kept=kept.finish(), stop=stop)
    assert made.trajectory().response_length == 2
    other = made.trajectory(replace(PROMPT, token_ids=np.array([9], np.int32)))
    assert (other.tokens.tolist(), other.index, other.rollout_id) == ([9], 12, 12)
    with pytest.raises(RewardError, match="--reward"):
        await made.score([other.finish()])

    async def scorer(group):
        return replace(group, samples=tuple(replace(s, reward=s.reward or 2.0) for s in group.samples))

    scored = await episode(Recorder(), scorer=scorer).score([other.finish(reward=1.0), other.finish()])
    assert [sample.reward for sample in scored] == [1.0, 2.0]
    waiting = asyncio.create_task(made.stopped())
    await asyncio.sleep(0)
    assert not waiting.done()
    stop.set()
    await asyncio.wait_for(waiting, 1)


def test_the_fast_decoder_gives_the_same_text():
    tokenizer = character_tokenizer("0123456789+= ", tokens=["\\boxed{"])
    tokens = np.array([*tokenizer.encode("12 + \\boxed{3="), tokenizer.eos_token_id], np.int32)
    assert decode(tokenizer, tokens) == tokenizer.decode(tokens.tolist(), skip_special_tokens=False)
    assert decode(tokenizer, tokens) == "12 + \\boxed{3=<end>"


@pytest.mark.parametrize(
    ("written", "stops", "kept"),
    [
        ("ablq", ("xy",), "ablq"),
        ("abdo", ("done",), "ab"),
        ("abdondon", ("done",), "abdon"),
        ("abdo", ("done", "bdoor"), "a"),
        ("abd", ("d",), "abd"),
        ("don", ("done",), ""),
        ("", ("done",), ""),
        ("abdo", (), "abdo"),
    ],
)
def test_tokens_that_may_begin_a_stop_string_are_generated_again(written, stops, kept):
    tokens = [ord(letter) - 97 for letter in written]
    aborted = completion(tokens, "abort", spans=[(4, 0, 1), (5, 1, len(tokens))] if len(tokens) > 1 else [])
    found = strip_partial_stop(aborted, stops, Letters())
    assert Letters().decode(found.token_ids, False) == kept
    assert found.log_probs.tolist() == [-token for token in tokens[: len(kept)]]
    covered = [place for span in found.spans for place in range(span.start, span.end)]
    assert covered == (list(range(len(kept))) if len(tokens) > 1 else [])
    assert found.finish_reason is FinishReason.ABORT


async def test_a_response_that_is_aborted_within_a_stop_string():
    class BreaksOff:
        async def generate(self, request):
            return completion([0, 3, 14], "abort" if "done" in request.sampling.stop else "length")

    made = episode(BreaksOff())
    sampling = replace(made.sampling, stop=("done",))
    assert (await made.complete(PROMPT.token_ids, sampling)).token_ids.tolist() == [0]
    assert (await made.complete(PROMPT.token_ids)).token_ids.tolist() == [0, 3, 14]
