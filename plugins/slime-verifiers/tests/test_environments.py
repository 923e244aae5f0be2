"""The real library, with environments written for it: tokens, log-probs and rewards of its episodes."""

import asyncio
import sys
from pathlib import Path

import numpy as np
import pytest

from slime_agents.served.agents import AgentFailed
from slime_core.errors import ConfigError, EngineError, PluginError
from slime_core.rollout.episode import EngineEpisode
from slime_core.types.completion import FinishReason, SamplingParams
from slime_core.types.sample import Status
from slime_models.new_model import character_tokenizer
from slime_plugin_kit.scripted_engine import ScriptedEngine
from slime_plugin_kit.scripted_rollout import client_of
from slime_sources.rendering.prompt_renderer import PromptRenderer
from slime_verifiers.config import VerifiersConfig, VerifiersTasksConfig
from slime_verifiers.plugin import Verifiers, VerifiersTasks

pytestmark = pytest.mark.runs

FOLDER = str(Path(__file__).parent / "environments")
CHAT = character_tokenizer("".join(map(chr, range(32, 127))) + "\n", ["<s>", "<e>", "<tool_call>", "</tool_call>"])
CHAT.eos_token = "<e>"
CHAT.add_special_tokens({"additional_special_tokens": ["<s>"]})
CHAT.chat_template = (
    "{% for tool in tools or [] %}[{{ tool.function.name }}]{% endfor %}"
    "{% for m in messages %}<s>{{ m.role }}\n{{ m.content }}<e>\n{% endfor %}"
    "{% if add_generation_prompt %}<s>assistant\n{% endif %}"
)
CALL = '<tool_call>{"name": "counter_letters", "arguments": {"word": "slime"}}</tool_call>'


class Speaker(ScriptedEngine):
    """Generates what the test makes from the text so far."""

    def __init__(self, reply, **options):
        super().__init__(vocab_size=len(CHAT), **options)
        self._reply = reply
        self.requests = []

    def script(self, request):
        self.requests.append(request)
        given = CHAT.encode(self._reply(CHAT.decode(request.token_ids)), add_special_tokens=False)
        tokens = [*given, CHAT.eos_token_id][: request.sampling.max_new_tokens]
        cut = len(tokens) <= len(given)
        return np.array(tokens, np.int32), FinishReason.LENGTH if cut else FinishReason.STOP


def tasks(taskset, *, folder=FOLDER, **options):
    """The source of a taskset's tasks."""
    config = VerifiersTasksConfig(taskset=taskset, folder=folder, **options)
    renderer = PromptRenderer(CHAT, label_key="label", apply_chat_template=True)
    return VerifiersTasks.build(config)(renderer, seed=1)


def play(taskset, reply, *, number=0, evaluation=False, budget=200, failure=None, env=None, **options):
    """The samples of a response to the taskset's prompt `number`, and the engine."""
    prompt = tasks(taskset).take(number + 1)[number]

    async def scene():
        engine = Speaker(reply, failure=failure)
        config = VerifiersConfig(env={"taskset": taskset, **(env or {})}, folder=FOLDER, **options)
        generator = Verifiers.build(config)
        episode = EngineEpisode(
            prompt=prompt, client=client_of(engine), evaluation=evaluation, index=12, position=0, scope="train", attempt=0,
            seed=5, stop=asyncio.Event(), sampling=SamplingParams(max_new_tokens=budget), max_context_len=None,
            tokenizer=CHAT, kept=None,
        )  # fmt: skip
        try:
            await generator.open()
            return await generator.generate(episode), engine
        finally:
            await generator.close()

    return asyncio.run(scene())


def pieces(sample):
    cuts = np.flatnonzero(np.diff(sample.loss_mask.astype(int))) + 1
    parts = zip(np.split(sample.loss_mask, cuts), np.split(sample.response_tokens, cuts), strict=True)
    return [(int(mask[0]), CHAT.decode(tokens)) for mask, tokens in parts]


def test_one_turn_has_the_engines_tokens_and_the_rubrics_reward():
    [sample], engine = play({"id": "slime_sums"}, lambda text: "8", number=4)
    asked = [{"role": "system", "content": "Add."}, {"role": "user", "content": "4+4="}]
    # The oracle: transformers, on what the environment asks.
    assert sample.prompt.token_ids.tolist() == CHAT.apply_chat_template(
        asked, add_generation_prompt=True, return_dict=False
    )
    (completion,) = engine.completions
    assert pieces(sample) == [(1, "8<e>")]
    assert sample.response_tokens.tolist() == completion.token_ids.tolist()
    assert sample.rollout_log_probs.tolist() == completion.log_probs.tolist()
    assert (sample.reward, dict(sample.reward_parts)) == (1.25, {"right": 1.0, "short": 1.0, "letters": 1.0})
    assert sample.status is Status.COMPLETED


def test_a_wrong_and_a_cut_answer():
    [wrong], _ = play({"id": "slime_sums"}, lambda text: "1234")
    assert (wrong.reward, wrong.reward_parts["letters"]) == (0.0, 4.0)
    [cut], _ = play({"id": "slime_sums"}, lambda text: "0123456789", budget=3)
    assert (pieces(cut), cut.status, cut.reward) == ([(1, "012")], Status.TRUNCATED, 0.5)


def test_turns_of_an_environment_are_one_sample():
    guesses = iter(["5", "8", "7"])
    [sample], engine = play({"id": "slime_guesses"}, lambda text: next(guesses), number=1)
    assert pieces(sample) == [
        (1, "5<e>"),
        (0, "\n<s>user\nmore<e>\n<s>assistant\n"),
        (1, "8<e>"),
        (0, "\n<s>user\nless<e>\n<s>assistant\n"),
        (1, "7<e>"),
    ]
    assert sample.reward == pytest.approx(1 / 3)
    log_probs = np.concatenate([completion.log_probs for completion in engine.completions])
    assert sample.rollout_log_probs[sample.loss_mask == 1].tolist() == log_probs.tolist()
    assert not sample.rollout_log_probs[sample.loss_mask == 0].any()


def test_an_environment_reads_text_without_special_tokens():
    # A model at the beginning of training writes them anywhere.
    guesses = iter(["<pad>5", "7<s><pad>"])
    [sample], _ = play({"id": "slime_guesses"}, lambda text: next(guesses), number=1)
    assert pieces(sample) == [(1, "<pad>5<e>"), (0, "\n<s>user\nmore<e>\n<s>assistant\n"), (1, "7<s><pad><e>")]
    assert sample.reward == 0.5


def test_an_agent_without_end_is_cut_and_scored():
    [sample], engine = play({"id": "slime_guesses"}, lambda text: "0", max_turns=3)
    assert (len(engine.requests), sample.reward, sample.status) == (3, 0.0, Status.TRUNCATED)


def test_an_environment_that_raises_is_reported():
    with pytest.raises(AgentFailed, match=r"slime_guesses: EnvError: .*the player does not know what a number is"):
        play({"id": "slime_guesses"}, lambda text: "?")


def test_an_episode_beyond_its_timeout_fails_with_the_environments_error():
    late = {"timeout": {"episode": 0.5}}
    with pytest.raises(AgentFailed, match=r"slime_guesses: TimeoutError: GuessEnv.run\(\) exceeded its 0.5s deadline"):
        play({"id": "slime_guesses"}, lambda text: "!", env=late)
    with pytest.raises(AgentFailed, match=r"it had not ended within 0\.5 s, and has no reward"):
        play({"id": "slime_guesses"}, lambda text: "!", timeout_s=0.5)


def test_a_repeated_attempt_counts_if_it_succeeds():
    replies = iter(["?", "3"])
    retries = {"retries": {"max_retries": 1}}
    [sample], engine = play({"id": "slime_guesses"}, lambda text: next(replies), env=retries)
    assert (len(engine.requests), sample.reward) == (2, 1.0)
    assert pieces(sample) == [(1, "3<e>")]


def test_an_engine_failure_is_raised_as_an_engine_error():
    with pytest.raises(EngineError, match="the engine died"):
        play({"id": "slime_sums"}, lambda text: "8", failure=EngineError("the engine died"))


def test_a_tool_behind_the_librarys_server(monkeypatch):
    monkeypatch.setenv("PYTHONPATH", FOLDER)
    [sample], engine = play({"id": "slime_tools"}, lambda text: "It is 5." if "tool\n5" in text else CALL)
    assert CHAT.decode(engine.requests[0].token_ids).startswith("[counter_letters]<s>user\nHow long")
    assert pieces(sample) == [
        (1, f"{CALL}<e>"),
        (0, "\n<s>tool\n5<e>\n<s>assistant\n"),
        (1, "It is 5.<e>"),
    ]
    assert sample.reward == 1.0


def test_each_agent_has_its_reward_and_a_judge_is_not_trained():
    taskset = {"id": "slime_debate"}
    # Both respond the same to the same question: only the caller distinguishes them.
    samples, engine = play(taskset, lambda text: "So.")
    assert len(engine.requests) == 3
    assert [(sample.metadata["agent"], sample.reward) for sample in samples] == [("pro", 1.0), ("con", -1.0)]
    assert [pieces(sample) for sample in samples] == [[(1, "So.<e>")]] * 2
    assert len({sample.credit_key for sample in samples}) == 2
    assert {sample.rollout_id for sample in samples} == {12}
    [last], _ = play(taskset, lambda text: "So.", evaluation=True)
    assert last.reward == -1.0


def test_tasks_are_prompts_and_a_restored_source_continues():
    source = tasks({"id": "slime_sums", "most": 3}, rollout_shuffle=True)
    first = source.take(4)
    assert sorted(prompt.label for prompt in first[:3]) == ["0", "2", "4"]
    assert {prompt.metadata["taskset"] for prompt in first} == {"slime_sums"}
    again = tasks({"id": "slime_sums", "most": 3}, rollout_shuffle=True)
    again.restore(source.state())
    assert [p.text for p in again.take(3)] == [p.text for p in source.take(3)]
    assert source.num_rows == 3


def test_missing_modules_are_reported_with_what_is_installed():
    with pytest.raises(
        PluginError, match=r'data\.taskset = "nosuch": there is no such module\. Installed: .*textarena'
    ):
        tasks({"id": "nosuch"})
    with pytest.raises(ConfigError, match=r"data\.many: Extra inputs"):
        tasks({"id": "slime_sums", "many": 3})
    with pytest.raises(ConfigError, match=r"generate\.env\.agent\.max_turns: Input should be a valid integer"):
        play({"id": "slime_sums"}, str, env={"agent": {"max_turns": "few"}})
    with pytest.raises(PluginError, match=r'generate\.env\.id = "nosuch": there is no such module'):
        play({"id": "slime_sums"}, str, env={"id": "nosuch"})
    assert "nosuch" not in sys.modules


@pytest.mark.parametrize("name", ["environments/slime_sums.py", "./slime_sums", "/x/slime_sums", "envs.slime_sums"])
def test_a_path_is_no_id(name):
    how = r'is not the name of a module\. For a file such as envs/sums\.py, set id = "sums" and data\.folder = "envs"'
    with pytest.raises(PluginError, match=how):
        tasks({"id": name})
    with pytest.raises(PluginError, match=r'set id = "sums" and generate\.folder = "envs"'):
        play({"id": "slime_sums"}, str, env={"id": name})


def test_the_folder_and_what_it_has_are_named(tmp_path):
    with pytest.raises(PluginError, match=r'data\.folder = ".*/nowhere": there is no such folder'):
        tasks({"id": "slime_sums"}, folder=str(tmp_path / "nowhere"))
    with pytest.raises(
        PluginError, match=r"In data\.folder: slime_debate, slime_guesses, .* data\.folder to the folder"
    ):
        tasks({"id": "slime_sum"})


TASKSET = """
import verifiers.v1 as vf
{before}
class Data(vf.TaskData):
    answer: str = "8"
class Task(vf.Task[{data}]):
    @vf.reward
    async def right(self, trace) -> float:
        return 1.0
class Other(Task):
    pass
class Set(vf.Taskset[{task}, vf.TasksetConfig]):
    def load(self):
        {inside}
        yield {made}(Data(prompt="4+4="), self.config.task)
__all__ = ["Set"]
"""
CODE = {"before": "", "data": "Data", "task": "Task", "inside": "", "made": "Task"}


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        (
            "quoted_task",
            {"task": "'Task'"},
            r'"quoted_task": the type parameter "Task" of Set is a name in quotes.*Define Task above',
        ),
        ("quoted_data", {"data": "'Data'"}, r'"quoted_data": the type parameter "Data" of Task is a name in quotes'),
        (
            "other_task",
            {"made": "Other"},
            r'data\.taskset = "other_task": task 0 is Other with Data, but Set declares Task with',
        ),
        ("base_data", {"data": "vf.TaskData"}, r"task 0 is Task with Data, but Set declares Task with TaskData"),
        ("raises", {"inside": "{}['x']"}, r'"raises": its code raised KeyError: \'x\' \(.*/raises\.py:14\)'),
        (
            "wrong",
            {"before": "1 / 0"},
            r'"wrong": its code raised ZeroDivisionError: division by zero \(.*/wrong\.py:3\)',
        ),
        ("syntax", {"before": "def"}, r"its code raised SyntaxError: .*\(syntax\.py, line 3\)"),
        ("imports", {"before": "from json import nothing"}, r"its code raised ImportError: .*imports\.py:3\)"),
        ("lacks", {"before": "import slime_lacking"}, r'"lacks": it requires slime_lacking, which is not installed'),
    ],
)
def test_a_taskset_that_would_lose_its_rewards_or_fails_is_named(tmp_path, name, change, message):
    (tmp_path / f"{name}.py").write_text(TASKSET.format(**{**CODE, **change}))
    with pytest.raises(PluginError, match=message):
        tasks({"id": name}, folder=str(tmp_path))


def test_an_environment_with_a_name_in_quotes_is_refused_with_other_prompts_too():
    with pytest.raises(
        PluginError, match=r'env\.taskset = "slime_quoted": the type parameter "QuotedTask" of QuotedTaskset is'
    ):
        play({"id": "slime_sums"}, str, env={"taskset": {"id": "slime_quoted"}})


def test_an_episode_without_any_reward_fails():
    with pytest.raises(AgentFailed, match=r"agent agent has no reward: its task has no method with @vf\.reward"):
        play({"id": "slime_unrewarded"}, lambda text: "x")


def test_sampling_of_an_agent_is_refused():
    with pytest.raises(ConfigError, match=r"generate\.env\.agent\.sampling: agents are sampled as the run is"):
        play({"id": "slime_sums"}, str, env={"agent": {"sampling": {"temperature": 0.5}}})
