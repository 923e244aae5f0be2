"""`slime plan`: its output for a tiny run, and its errors on input it cannot use."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

if TYPE_CHECKING:
    from conftest import TinyRun

pytestmark = pytest.mark.usefixtures("tiny_forks")

CONFIG, MODEL = 2, 3
DOES_NOT_FIT = 1


def test_a_run_is_planned_and_nothing_started(tiny: TinyRun) -> None:
    ended = tiny.slime("plan", "run.toml", "--device", "cpu", "--device-memory", "64GiB")
    assert (ended.code, ended.err) == (0, "")
    for text in (
        "tiny, planned for CPUs with 64.0 GiB a machine (--device-memory)",
        "A step (of 5 steps): 2 prompts x 2 = 4 responses of at most 4 tokens",
        "prompts: no limit is set, so the data decides (--rollout-max-prompt-len)",
        "actor: 1 data-parallel rank; micro-batches of at most 8,192 tokens a rank",
        "Fits: 0 % of 64.0 GiB",
        "~ is an estimate.",
    ):
        assert text in ended.out, ended.out
    assert not tiny.runs.exists()


def test_json_has_every_line_of_the_report(tiny: TinyRun) -> None:
    ended = tiny.slime("plan", "run.toml", "--device-memory", "80GiB", "--json", "--rollout-max-prompt-len", "4")
    plan = json.loads(ended.out)
    assert plan["target"] == {"device": "cuda", "device_bytes": 80 * 2**30, "found": "--device-memory"}
    assert plan["step"]["longest_sequence"] == 8
    (group,) = plan["groups"]
    assert (group["name"], group["fits"], group["not_told"]) == ("actor and engines", True, [])
    weights = next(line for line in group["roles"][0]["memory"] if line["component"] == "weights")
    stored = sum(file.stat().st_size for file in (tiny / "base").glob("*.safetensors"))
    # The folder has float32 weights behind a header.
    assert 0.8 * stored < weights["num_bytes"] < stored
    assert weights["moments"] == ["idle", "score", "loss", "backward", "reduce", "step", "sync"]
    assert group["engines"]["kv_tokens"] == 512 * 64


def test_a_run_that_does_not_fit_has_its_own_exit_code_and_lists_flags_that_save_memory(tiny: TinyRun) -> None:
    words = ("plan", "run.toml", "--device-memory", "20MiB", "--max-tokens-per-gpu", "65536")
    ended = tiny.slime(*words)
    assert ended.code == DOES_NOT_FIT
    assert "Does not fit:" in ended.out
    assert "planned for GPUs with 20.0 MiB each" in ended.out
    assert "--max-tokens-per-gpu 32768  -> " in ended.out
    # The flags that it names exist, and save as much as it states.
    saving = json.loads(tiny.slime(*words, "--json").out)["savings"][0]
    (again,) = json.loads(tiny.slime(*words, *saving["flags"].split(), "--json").out)["groups"]
    assert again["needed_bytes"] == saving["num_bytes"]


def test_a_folder_with_nothing_but_a_config_is_enough(tiny: TinyRun) -> None:
    words = ("plan", "run.toml", "--device-memory", "80GiB", "--json")
    whole = json.loads(tiny.slime(*words).out)
    for file in Path(tiny / "base").iterdir():
        if file.name != "config.json":
            file.unlink()
    (tiny / "train.jsonl").unlink()
    assert json.loads(tiny.slime(*words).out) == whole


@pytest.mark.parametrize(
    ("words", "code", "expected"),
    [
        (["missing.toml"], CONFIG, "missing.toml: no such run file. There is: run.toml."),
        (["run.toml", "--max-tokens-per-gpuu", "3"], CONFIG, "close match: --max-tokens-per-gpu"),
        (
            ["run.toml", "--device-memory", "80"],
            CONFIG,
            "--device-memory 80: a size with its unit is required, such as 80GiB",
        ),
        (["run.toml", "--device-memory"], CONFIG, "--device-memory requires a value."),
        (["run.toml", "--hf-checkpoint", "nowhere"], MODEL, "nowhere: no such folder."),
        (["run.toml", "--lora-alpha", "3"], CONFIG, "backend.lora_alpha: has no effect without adapters"),
        (["--json"], CONFIG, "no run file given: slime plan run.toml [--flag value ...]"),
    ],
)
def test_bad_input_is_reported_at_once(words: list[str], code: int, expected: str, tiny: TinyRun) -> None:
    ended = tiny.slime("plan", *words)
    assert expected in ended.error
    assert ended.code == code


def test_a_damaged_config_is_reported(tiny: TinyRun) -> None:
    (tiny / "base" / "config.json").write_text("{")
    ended = tiny.slime("plan", "run.toml")
    assert "config.json: not valid JSON" in ended.error
    assert ended.code == MODEL


def test_a_mistake_in_a_flag_is_reported_before_torch_is_imported(tiny: TinyRun) -> None:
    code = """
import sys
from slime_core.cli.main import main
try:
    main()
except SystemExit as ended:
    sys.exit("torch" in sys.modules and "torch was imported" or ended.code)
"""
    command = [sys.executable, "-c", code, "plan", "run.toml", "--nope"]
    ended = subprocess.run(command, cwd=tiny.folder, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stderr) == (
        CONFIG,
        "error: --nope: unknown flag. `slime config explain` lists every key.\n",
    )


def test_help_lists_its_own_options(tiny: TinyRun) -> None:
    ended = tiny.slime("plan", "--help")
    assert ended.code == 0
    for option in ("--device-memory SIZE", "--json", "--debug"):
        assert option in ended.out
