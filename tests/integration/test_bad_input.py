"""`slime run` with input it cannot use: one paragraph that names the key and the fix, and an exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import Ended, TinyRun

pytestmark = pytest.mark.usefixtures("tiny_forks")

CONFIG, DATA, MODEL, REWARD, STORAGE = 2, 3, 3, 4, 8


@dataclass(frozen=True)
class Case:
    """Arguments after `slime run run.toml`, and what the error must contain."""

    words: Sequence[str]
    code: int
    expected: Sequence[str]
    files: dict[str, str] = field(default_factory=dict)
    change: Callable[[TinyRun], object] | None = None
    """Applied to the folder before the run."""


def in_run_file(old: str, new: str) -> Callable[[TinyRun], object]:
    def change(tiny: TinyRun) -> None:
        text = (tiny / "run.toml").read_text()
        assert old in text
        (tiny / "run.toml").write_text(text.replace(old, new))

    return change


def check(tiny: TinyRun, case: Case, ended: Ended) -> None:
    message = ended.error
    missing = [text for text in case.expected if text.replace("{folder}", str(tiny.folder)) not in message]
    assert not missing, f"{missing} not in: {message}"
    assert ended.code == case.code, message
    assert not tiny.runs.exists(), "something was started"


# Errors that the kernel reports before torch is imported.
CONFIG_CASES = {
    "unknown flag": Case(
        ["--rollout-batch-sise", "3"],
        CONFIG,
        ["--rollout-batch-sise: unknown flag", "close match: --rollout-batch-size", "slime config explain"],
    ),
    "flags of plugins that are not chosen": Case(
        ["--no-sequence-parallel", "--sglang-servers", "2", "--compression-level", "3"],
        CONFIG,
        [
            "--no-sequence-parallel: unknown flag without the plugin that it belongs to: --backend megatron.",
            "--sglang-servers: unknown flag without the plugin that it belongs to: --engine sglang.",
            "--compression-level: unknown flag without the plugin that it belongs to: --transport delta.",
        ],
    ),
    "unknown key in a table": Case(
        [],
        CONFIG,
        ["train.num_rolout: unknown option; close match: num_rollout"],
        change=in_run_file("num_rollout", "num_rolout"),
    ),
    "unknown table": Case(
        [], CONFIG, ["trian: unknown option; close match: train"], change=in_run_file("[train]", "[trian]")
    ),
    "unknown algorithm": Case(
        ["--algo", "gsp0"],
        CONFIG,
        ['algo.name = "gsp0": unknown algorithm; close match: gspo', "Available:", "grpo", "(slime-grpo 0.2.0)"],
    ),
    "unknown backend": Case(
        ["--backend", "fdsp"], CONFIG, ['backend.name = "fdsp": unknown backend; close match: fsdp', "Available: "]
    ),
    "unknown engine": Case(["--engine", "loacl"], CONFIG, ['engine.name = "loacl"', "close match: local"]),
    "unknown reward": Case(["--reward", "gsm8"], CONFIG, ['reward.name = "gsm8"', "close match: gsm8k", "Available: "]),
    "unknown KL estimator, though there is no KL": Case(
        ["--kl-loss-type", "low_var"],
        CONFIG,
        ['algo.kl_loss_type = "low_var": unknown KL estimator; close match: low_var_kl', "Available: "],
    ),
    "a correction that can do nothing": Case(
        ["--corrections", "opsm"], CONFIG, ['algo.corrections: "opsm"', "--num-steps-per-rollout 2 or more"]
    ),
    "a correction of a gap that is defined away": Case(
        ["--corrections", "tis", "--use-rollout-logprobs"], CONFIG, ['correction "tis"', "0 by definition", "Drop one"]
    ),
    "bounds the wrong way around": Case(
        ["--corrections", "mis", "--tis-lower-bound", "3"],
        CONFIG,
        ["tis_lower_bound = 3 must be below tis_upper_bound = 2"],
    ),
    "text for a number": Case(
        ["--lr", "fast"], CONFIG, ['train.lr = "fast": input should be a valid number'], change=None
    ),
    "a number out of range": Case(["--lr", "-1"], CONFIG, ["train.lr", "greater than 0"]),
    "numbers that are not finite": Case(
        ["--critic-lr", "nan", "--rollout-temperature", "1e999"],
        CONFIG,
        [
            "train.lr = inf: input should be a finite number",
            'roles.critic.lr = "nan"',
            'rollout.rollout_temperature = "1e999"',
        ],
        change=in_run_file("lr = 1e-3", "lr = inf"),
    ),
    "an option of a plugin that is not finite": Case(
        ["--eps-clip", "inf"],
        CONFIG,
        ['algo.eps_clip = "inf": input should be a finite number'],
    ),
    "not one of the choices": Case(
        ["--on-bad-row", "maybe"], CONFIG, ['data.on_bad_row = "maybe"', "'error' or 'skip'"]
    ),
    "a flag without its value": Case(["--num-rollout"], CONFIG, ["--num-rollout requires a value"]),
    "several problems at once": Case(
        ["--nope", "3", "--lr", "fast", "--num-rollout=two", "--algo", "gsp0"],
        CONFIG,
        ["--nope: unknown flag", "train.lr", "train.num_rollout", "close match: gspo"],
    ),
    "several unknown plugins at once": Case(
        ["--nope", "--backend", "fdsp", "--algo", "gsp0", "--reward", "gsm8"],
        CONFIG,
        ["--nope: unknown flag", "close match: fsdp", "close match: gspo", "close match: gsm8k"],
    ),
    "not TOML": Case(
        [], CONFIG, ["run.toml: not valid TOML", "line 7, column 9"], change=in_run_file("[model]", "model = = 1")
    ),
    "a plugin file that is not there": Case(
        ["--plugin", "mine.py"], CONFIG, ["--plugin {folder}/mine.py", "cannot be read"]
    ),
    "a plugin file that fails": Case(
        ["--plugin", "mine.py"], CONFIG, ["mine.py, line 2: ZeroDivisionError"], files={"mine.py": "\n1 / 0\n"}
    ),
    "batch size that does not divide": Case(
        ["--global-batch-size", "3"],
        CONFIG,
        ["rollout_batch_size 2 x n_samples_per_prompt 2 = 4", "global_batch_size 3", "Nearest that fit: 2 and 4"],
    ),
    "steps that do not divide": Case(
        ["--num-steps-per-rollout", "3"], CONFIG, ["= 4 does not divide by num_steps_per_rollout 3", "2 and 4"]
    ),
    "batch size and steps that contradict": Case(
        ["--global-batch-size", "2", "--num-steps-per-rollout", "4"],
        CONFIG,
        ["= 4, but global_batch_size 2 x num_steps_per_rollout 4 = 8"],
    ),
    "over-sampling below the batch size": Case(
        ["--over-sampling-batch-size", "1"], CONFIG, ["over_sampling_batch_size 1 is smaller than", "set 2 or more"]
    ),
    "two local ranks": Case(
        ["--actor-num-gpus-per-node", "2"], CONFIG, ['launcher.name = "local" runs one trainer rank', "--launcher ray"]
    ),
    "a checkpoint step that is no number": Case(["--ckpt-step", "last"], CONFIG, ["--ckpt-step last", "step_4"]),
    "a fresh start that is to continue": Case(
        ["--fresh", "--ckpt-step", "4"], CONFIG, ["--fresh removes the run that --ckpt-step would resume"]
    ),
    "both a name and a broken key": Case(
        ["--name", "other", "--lr", "fast"],
        CONFIG,
        ['train.lr = "fast"'],
    ),
}

MODEL_CASES = {
    "no model folder": Case(
        ["--hf-checkpoint", "bsae"], MODEL, ["model.hf_checkpoint = {folder}/bsae: no such folder"]
    ),
    "no config.json": Case(
        [],
        MODEL,
        ["{folder}/base: no config.json", "tokenizer.json"],
        change=lambda t: (t / "base/config.json").unlink(),
    ),
    "config.json that is no JSON": Case(
        [], MODEL, ["base/config.json: not valid JSON"], change=lambda t: (t / "base/config.json").write_text("{")
    ),
    "no weights": Case(
        [],
        MODEL,
        ["{folder}/base: no weights", "safetensors"],
        change=lambda t: (t / "base/model.safetensors").unlink(),
    ),
    "weights cut short": Case(
        [],
        MODEL,
        ["base/model.safetensors: damaged or cut short", "1000 bytes"],
        change=lambda t: os.truncate(t / "base/model.safetensors", 1000),
    ),
    "an index that is no JSON": Case(
        [],
        MODEL,
        ["base/model.safetensors.index.json: cannot be read", "Copy or download it again"],
        files={"base/model.safetensors.index.json": "{"},
    ),
    "an index of files that are not there": Case(
        [],
        MODEL,
        ["base/model.safetensors.index.json: it names files that are not there: model-00002-of-00002.safetensors"],
        files={"base/model.safetensors.index.json": '{"weight_map": {"x": "model-00002-of-00002.safetensors"}}'},
    ),
    "no tokenizer": Case(
        [],
        MODEL,
        ["base: no tokenizer in it (tokenizer.json"],
        change=lambda t: [path.unlink() for path in (t / "base").glob("tokenizer*")],
    ),
}

BROKEN = '{"prompt": "1+1=", "label": "2"}\n{"prompt": "1+\n{"prompt": "2+2=", "label": "4"}\n'

# These need the tokenizer, so transformers and torch.
DATA_CASES = {
    "no data file": Case(
        ["--prompt-data", "trian.jsonl"], DATA, ["no file {folder}/trian.jsonl", "close match: train.jsonl"]
    ),
    "empty data file": Case(
        ["--prompt-data", "no.jsonl"], DATA, ["no.jsonl", "the file is empty"], files={"no.jsonl": ""}
    ),
    "broken row": Case(
        ["--prompt-data", "b.jsonl"],
        DATA,
        ["b.jsonl, line 2: not valid JSON", "--on-bad-row skip"],
        files={"b.jsonl": BROKEN},
    ),
    "no prompt key": Case(
        ["--input-key", "question"],
        DATA,
        ['train.jsonl, line 1: no key "question"', "the row has: prompt, label", "--input-key"],
    ),
    "no label key": Case(
        ["--label-key", "solution"], DATA, ['no key "solution"', "the row has: prompt, label", "--label-key"]
    ),
    "all prompts too long": Case(
        ["--rollout-max-prompt-len", "3"],
        DATA,
        ["none of the 20 rows", "the shortest prompt has 4 tokens", "rollout_max_prompt_len is 3"],
    ),
    "all prompts as long as the context": Case(
        ["--prompt-data", "long.jsonl"],
        DATA,
        ["none of the 1 rows", "the shortest prompt has 64 tokens and the model reads 64 tokens, one of which is left"],
        files={"long.jsonl": json.dumps({"prompt": "1" * 64, "label": "1"})},
    ),
    "an evaluation set as long as the context": Case(
        ["--eval-prompt-data", "held_out", "long.jsonl"],
        DATA,
        ["eval.datasets.held_out: ", "none of the 1 rows", "the model reads 64 tokens"],
        files={"long.jsonl": json.dumps({"prompt": "1" * 64, "label": "1"})},
    ),
    "text that the tokenizer cannot express": Case(
        ["--prompt-data", "odd.jsonl"],
        DATA,
        [
            "odd.jsonl, line 2: the tokenizer cannot express 25.00% of the text, such as 'é'",
            "--max-unknown-share 0.25",
        ],
        files={"odd.jsonl": '{"prompt": "1+1=", "label": "2"}\n{"prompt": "1+é=", "label": "2"}\n'},
    ),
    "fewer rows than one step": Case(
        ["--prompt-data", "train.jsonl@[:1]"],
        CONFIG,
        ["train.num_epoch = 1: 1 rows do not fill one step of 2 prompts", "--rollout-batch-size"],
        change=in_run_file("num_rollout = 5", "num_epoch = 1"),
    ),
    "no evaluation file": Case(
        ["--eval-prompt-data", "held_out", "nope.jsonl"],
        DATA,
        ["eval.datasets.held_out", "no file {folder}/nope.jsonl"],
    ),
    "no chat template": Case(
        ["--apply-chat-template"], MODEL, ["no chat template", "chat_template.jinja", "omit --apply-chat-template"]
    ),
    "no GPU": Case(["--device", "cuda"], CONFIG, ['launcher.device = "cuda"', "Pass --device cpu"]),
}


@pytest.fixture
def bad(tiny: TinyRun, case: Case) -> TinyRun:
    for name, text in case.files.items():
        (tiny / name).write_text(text)
    if case.change is not None:
        case.change(tiny)
    return tiny


@pytest.mark.parametrize("case", [pytest.param(c, id=i) for i, c in (CONFIG_CASES | MODEL_CASES).items()])
def test_bad_config_is_reported_at_once(bad: TinyRun, case: Case) -> None:
    check(bad, case, bad.run(*case.words))


@pytest.mark.parametrize("case", [pytest.param(c, id=i) for i, c in DATA_CASES.items()])
def test_bad_data_is_reported_by_a_dry_run(bad: TinyRun, case: Case) -> None:
    check(bad, case, bad.run("--dry-run", *case.words))


def test_no_run_file(tiny: TinyRun) -> None:
    ended = tiny.slime("run", "rum.toml")
    assert ended.code == CONFIG
    assert "rum.toml: no such run file. There is: run.toml." in ended.error
    assert "slime run run.toml" in tiny.slime("run", "--lr", "1").error


def test_a_config_error_needs_no_torch(tiny: TinyRun) -> None:
    code = """
import sys
from slime_core.cli.main import main
try:
    main()
except SystemExit as ended:
    heavy = {"torch", "transformers", "ray", "pyarrow", "numpy"} & set(sys.modules)
    sys.exit(f"imported: {heavy}" if heavy else ended.code)
"""
    command = [sys.executable, "-c", code, "run", "run.toml", "--nope"]
    ended = subprocess.run(command, cwd=tiny.folder, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (
        CONFIG,
        "error: --nope: unknown flag. `slime config explain` lists every key.\n",
    )


def test_debug_shows_the_traceback(tiny: TinyRun) -> None:
    ended = tiny.run("--nope", "--debug")
    assert ended.code != 0
    assert "Traceback" in ended.err
    assert "--nope: unknown flag" in ended.err


def test_a_dry_run_starts_nothing_and_counts_what_is_left_out(tiny: TinyRun) -> None:
    rows = ['{"prompt": "1+1=", "label": "2"}', '{"prompt": "1+', '{"prompt": "11+11=", "label": "22"}']
    (tiny / "mixed.jsonl").write_text("\n".join([*rows, *rows[:1]]))
    options = ["--prompt-data", "mixed.jsonl", "--on-bad-row", "skip", "--rollout-max-prompt-len", "4"]
    ended = tiny.run("--dry-run", *options)
    assert (ended.code, ended.err) == (0, "")
    plan = json.loads(ended.out)
    assert plan["rows"] == 2
    assert plan["data"] == {"rollout/data/num_bad_rows": 1, "rollout/data/num_too_long": 1, "rollout/data/epoch": 0}
    assert not tiny.runs.exists()

    ended = tiny.run("--num-rollout", "1", *options)
    assert (ended.code, ended.err) == (0, "")
    (metrics,) = [record["metrics"] for record in tiny.metrics() if record["axis"] == "rollout/step"]
    assert metrics["rollout/data/num_bad_rows"] == metrics["rollout/data/num_too_long"] == 1


def test_rows_beyond_the_context_are_named(tiny: TinyRun) -> None:
    row = json.dumps({"prompt": "1" * 64, "label": "1"})
    (tiny / "train.jsonl").write_text((tiny / "train.jsonl").read_text() + row)
    ended = tiny.run("--dry-run")
    assert ended.code == 0
    assert ended.err == (
        f"warning: data: 1 row ({tiny / 'train.jsonl'}, line 21: 64 tokens): left out, because the model reads 64 tokens, "
        "one of which is left for the response (rollout/data/num_too_long)\n"
    )
    assert json.loads(ended.out)["rows"] == 20


@pytest.mark.parametrize("words", [["--dry-run"], []])
def test_a_dry_run_rejects_what_a_start_rejects(tiny: TinyRun, words: Sequence[str]) -> None:
    """An observer is not named in the run file, and so not bound with it."""
    (tiny / "watch.py").write_text("from slime_core.plugin import hook\n@hook\ndef step_trained(event, more): ...\n")
    ended = tiny.run("--plugin", "watch.py", *words)
    assert ended.code == CONFIG
    assert "hook module watch.py/watch" in ended.error
    assert "Hooks take one parameter, event." in ended.error
    assert tiny.runs.exists() == (not words)


REWARDS = """
import math, os, time
from slime_core.plugin import reward


@reward("hangs")
def hangs(sample):
    time.sleep(60)


@reward("nan")
def nan(sample):
    return math.nan


@reward("text")
def text(sample):
    return "good"


@reward("dies")
def dies(sample):
    os._exit(3)


@reward("flaky")
def flaky(sample):
    match sample.group_index % 8:
        case 1:
            raise ValueError("no response key")
        case 3:
            time.sleep(60)
        case 5:
            return math.nan
    return sample.index % 2
"""


@pytest.mark.parametrize(
    ("reward", "expected"),
    [
        ("hangs", ["no response within 1 s", "--reward-timeout", "--on-reward-failure fail_sample"]),
        ("nan", ["returned nan; rewards must be finite"]),
        ("text", ["returned 'good', which is not a number"]),
        ("dies", ["worker process died (exit code 3)", "--on-reward-failure fail_sample"]),
    ],
)
def test_an_unusable_reward_is_reported(tiny: TinyRun, reward: str, expected: Sequence[str]) -> None:
    (tiny / "rewards.py").write_text(REWARDS)
    ended = tiny.run("--plugin", "rewards.py", "--reward", reward, "--reward-timeout", "1")
    assert ended.code == REWARD
    for text in (f'reward "rewards.py/{reward}" on {tiny.folder}/train.jsonl, line 1', *expected):
        assert text in ended.error


def test_a_failing_reward_costs_only_its_groups(tiny: TinyRun) -> None:
    (tiny / "rewards.py").write_text(REWARDS)
    options = ["--plugin", "rewards.py", "--reward", "flaky", "--reward-timeout", "1", "--on-failed-group", "drop"]
    ended = tiny.run(*options, "--on-reward-failure", "fail_sample", "--num-rollout", "3")
    assert (ended.code, ended.err) == (0, "")
    assert tiny.steps() == [0, 1, 2]
    rollouts = [record["metrics"] for record in tiny.metrics() if record["axis"] == "rollout/step"]
    failed = [metrics.get("rollout/failed_groups", 0) for metrics in rollouts]
    # Draws 1, 3, 5: steps are 0 2 | 4 6 | 7 8 with what replaces them.
    assert sum(failed) == 3


def test_a_label_that_the_reward_misses(tiny: TinyRun) -> None:
    in_run_file('label_key = "label"\n', "")(tiny)
    ended = tiny.run()
    assert ended.code == REWARD
    assert "train.jsonl, line 1 has no label" in ended.error
    assert "data.label_key" in ended.error


def test_a_file_where_the_runs_should_go(tiny: TinyRun) -> None:
    (tiny / "runs").write_text("in the way")
    ended = tiny.run()
    assert ended.code == STORAGE
    assert f"{tiny.runs}/tiny: cannot be written" in ended.error
    assert "--runs-dir" in ended.error
    assert (tiny / "runs").read_text() == "in the way"
