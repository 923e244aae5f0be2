"""multi_agent: who reads what, who is compared with whom, who gets which reward."""

from dataclasses import replace

import numpy as np
import pytest
from agents_speaker import decode
from pydantic import ValidationError

from slime_agents.config import MultiAgentConfig
from slime_agents.multi_agent import MultiAgent
from slime_core.algorithm.build_batch import build_batch
from slime_core.errors import ConfigError, PluginError, RewardError
from slime_core.types.sample import SampleGroup, Status
from slime_estimators.comparison import RewardGroups

SOLVER = {"name": "solver", "count": 2}
CRITIC = {
    "name": "critic",
    "prompt": "{{ answers.solver | join('/') }} {{ metadata['from'] }} {{ round }}?",
    "outcome_share": 1,
}
EDITOR = {
    "name": "editor",
    "prompt": "{{ prompt }}{{ answers.critic[-1] }}:",
    "outcome_share": 0.25,
    "max_new_tokens": 5,
}


def multi(*agents, **options):
    return MultiAgent(MultiAgentConfig(agents=agents, **options))


def reply(text):
    return "bad" if text.endswith("?") else "42" if text.endswith(":") else "41<end>"


async def by_length(group):
    """A point for each token of the response."""
    return replace(group, samples=tuple(replace(s, reward=float(s.response_length)) for s in group.samples))


def test_each_reads_the_earlier_ones(speak):
    samples, engine = speak(reply, multi(SOLVER, CRITIC, EDITOR, rounds=2), scorer=by_length)
    assert engine.heard == [
        "6*7=", "6*7=", "41/41 a test 0?", "6*7=bad:",
        "6*7=", "6*7=", "41/41/41/41 a test 1?", "6*7=bad:",
    ]  # fmt: skip
    assert [sample.metadata["agent"] for sample in samples] == ["solver", "solver", "critic", "editor"] * 2
    for sample, heard, completion in zip(samples, engine.heard, engine.completions, strict=True):
        assert decode(sample.tokens[: sample.prompt_length]) == heard == sample.prompt.text
        assert np.array_equal(sample.response_tokens, completion.token_ids)
        assert sample.loss_mask.all()
    assert {(sample.index, sample.rollout_id, sample.group_index) for sample in samples} == {(12, 12, 3)}
    # Responses at once differ, and each can be made again.
    assert len({request.seed for request in engine.requests}) == 8
    assert [request.sampling.max_new_tokens for request in engine.requests[:4]] == [400, 400, 400, 5]


def test_outcome_share_mixes_own_reward_and_outcome(speak):
    samples, _ = speak(reply, multi(SOLVER, CRITIC, EDITOR), scorer=by_length)
    # Own: "41<end>" + end 4, "bad" 4, "42" 3, which is the outcome.
    assert [sample.reward for sample in samples] == [4.0, 4.0, 3.0, 3.0]
    assert dict(samples[2].reward_parts) == {"own": 4.0, "outcome": 3.0}
    half, _ = speak(reply, multi({**SOLVER, "outcome_share": 0.5}, CRITIC), scorer=by_length)
    assert [sample.reward for sample in half] == [4.0, 4.0, 4.0]
    alone, _ = speak(reply, multi(SOLVER), scorer=None)
    assert [sample.reward for sample in alone] == [None, None]
    with pytest.raises(RewardError, match="the run has none"):
        speak(reply, multi(SOLVER, CRITIC), scorer=None)


def test_agents_are_compared_with_themselves(speak):
    generator = multi(SOLVER, CRITIC)
    groups = []
    for position, length in enumerate((1, 3)):
        samples, _ = speak(
            lambda text, length=length: "a" * length + ("" if "?" in text else "bb"), generator, scorer=by_length
        )
        groups += [replace(s, index=20 + position, rollout_id=20 + position) for s in samples]
    batch = build_batch([SampleGroup(prompt=groups[0].prompt, samples=tuple(groups))])
    assert batch.credit_key.tolist() == [-7, -7, -8] * 2
    compared = RewardGroups.of(batch, batch.reward)
    # Two rollouts in each of two groups, whatever the number of samples.
    assert compared.num_rollouts.tolist() == [2, 2]
    assert compared.deviation.tolist() == [-1, -1, -1, 1, 1, 1]


def test_an_evaluation_sees_the_outcome_alone(speak):
    samples, engine = speak(reply, multi(SOLVER, CRITIC, EDITOR), evaluation=True, scorer=None)
    assert [sample.metadata["agent"] for sample in samples] == ["editor"]
    assert len(engine.requests) == 4


def test_messages_go_through_the_chat_template(speak):
    messages = [{"role": "user", "content": "6*7"}]
    _, engine = speak(
        reply, multi({"name": "solver"}, EDITOR | {"prompt": "{{ prompt }}|"}), messages=messages, scorer=by_length
    )
    assert engine.heard == ["6*7=", "<user>6*7|\n<assistant>"]


def test_words_of_others_are_no_special_tokens(speak):
    # Taken out once, the pieces around make another one.
    samples, engine = speak(
        lambda text: "4<e<end>nd>2", multi({"name": "solver"}, {"name": "next", "prompt": "{{ answers.solver[0] }}!"})
    )
    assert samples[0].raw_response.count("<end>") >= 1
    assert engine.requests[1].token_ids.tolist().count(1) == 0


def test_a_failure_ends_where_it_is(speak):
    samples, _ = speak(reply, multi(SOLVER, CRITIC), budget=2, scorer=by_length)
    assert {sample.status for sample in samples} == {Status.TRUNCATED}
    with pytest.raises(ConfigError, match=r"agents.b.prompt: unexpected"):
        multi({"name": "b", "prompt": "{{ }"})
    with pytest.raises(PluginError, match=r"agents.b.prompt on .*answers with a, b"):
        speak(reply, multi({"name": "a"}, {"name": "b", "prompt": "{{ answers.c }}"}))
    with pytest.raises(PluginError, match=r"agents.b.prompt on .*no tokens"):
        speak(reply, multi({"name": "b", "prompt": "{{ '' }}"}))
    with pytest.raises(ValidationError, match="a, a: each needs a name of its own"):
        MultiAgentConfig(agents=({"name": "a"}, {"name": "a"}))
