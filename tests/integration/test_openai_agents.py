"""A whole run that trains an agent of the openai-agents package, which calls OpenAI's responses API with default settings."""

import json

import pytest

from slime_core.data.table import read_groups
from slime_models.new_model import ModelSizes, new_model

pytestmark = pytest.mark.runs

PLUGIN = '''
from agents import Agent, OpenAIProvider, RunConfig, Runner, function_tool
from slime_agents.plugin import agent
from slime_core.plugin import reward


@function_tool
def count(shelf: str) -> str:
    """How many."""
    return "3"


@agent("counter")
async def counter(task):
    settings = RunConfig(
        model=task.model,
        model_provider=OpenAIProvider(base_url=task.base_url, api_key=task.api_key),
        tracing_disabled=True,
    )
    asked = Agent(name="counter", instructions="Add.", tools=[count])
    await Runner.run(asked, task.prompt, run_config=settings)


@reward("digits")
def digits(sample):
    return float(sum(character.isdigit() for character in sample.response))
'''
RUN = """\
name = "counts"
backend = "fsdp"
engine = "local"
algo = "grpo"
plugin = ["counter.py"]
generate = "counter"
reward = "digits"
[model]
hf_checkpoint = "base"
[data]
prompt_data = "train.jsonl"
input_key = "prompt"
[rollout]
rollout_batch_size = 2
n_samples_per_prompt = 2
rollout_max_response_len = 6
dump_rollouts = true
[train]
num_rollout = 2
[checkpoint]
save_hf = false
"""


def test_an_agent_with_default_settings_is_trained(warm, tmp_path):
    pytest.importorskip("agents", reason="pip install openai-agents")
    sizes = ModelSizes(hidden_size=32, num_layers=1, num_heads=2, num_kv_heads=2, intermediate_size=32, max_length=64)
    template = "{{ tools[0].function.name }} {% for m in messages %}{{ m.content }} {% endfor %}"
    alphabet = "0123456789+= Acdountz."
    new_model(tmp_path / "base", "qwen3", sizes, alphabet=alphabet, chat_template=template, initializer_range=0.3)
    (tmp_path / "counter.py").write_text(PLUGIN)
    (tmp_path / "train.jsonl").write_text("".join(json.dumps({"prompt": f"{n}+{n}="}) + "\n" for n in range(4)))
    (tmp_path / "run.toml").write_text(RUN)
    code, out, err = warm.run(["run", "run.toml"], tmp_path)
    assert code == 0, out[-2000:] + err
    folder = tmp_path / "runs" / "counts"
    groups = [group for path in sorted((folder / "rollouts").glob("*.parquet")) for group in read_groups(path)]
    samples = [sample for group in groups for sample in group.samples]
    assert len(samples) == 8
    for sample in samples:
        # The instructions and the tool of the agent, and the task.
        assert sample.prompt.text == f"count Add. {sample.prompt.text.split()[-1]} "
        assert sample.reward == sum(character.isdigit() for character in sample.response)
        assert sample.loss_mask.all()
        assert sample.response_length
    logged = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [line["metrics"] for line in logged if line["axis"] == "rollout/step"]
    assert len(steps) == 2
    assert len({sample.reward for sample in samples}) > 1
