"""Launch lines and scripts to run files."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

import pytest

from slime_compat.command import main
from slime_compat.launch_line import from_script
from slime_sglang.server_args import ServerOption

LAUNCH = Path(__file__).parent / "launch"
LINE = (
    "--hf-checkpoint base --prompt-data train.jsonl --rm-type math --rollout-batch-size 4 --rollout-max-response-len 8"
)


@pytest.fixture
def translate(capsys):
    """`translate(flags, ...)` gives the tables, what is on stderr, and the exit code."""

    def run(flags, *, own=(), entry="train.py", line=LINE):
        with pytest.raises(SystemExit) as ended:
            main(["translate", *own, "--", "python3", entry, *line.split(), *flags.split()])
        out, err = capsys.readouterr()
        return tomllib.loads(out), err, ended.value.code

    return run


def test_defaults_that_differ_are_written_out(translate):
    tables, err, code = translate("")
    assert (code, err) == (0, "")
    assert tables["algo"] == {
        "name": "grpo",
        "eps_clip": 0.2,
        "eps_clip_high": 0.2,
        "aggregation": "seq_mean",
        "kl_loss_type": "k1",
    }
    train = {"weight_decay": 0.01, "adam_beta2": 0.999, "lr_decay_style": "linear", "use_dynamic_batch_size": False}
    assert tables["train"] == train
    assert tables["rollout"] == {"rollout_seed": 42, "rollout_batch_size": 4, "rollout_max_response_len": 8}
    assert (tables["backend"], tables["engine"], tables["reward"]) == ("megatron", "sglang", "math")
    assert tables["launcher"] == {"actor_num_nodes": 1, "actor_num_gpus_per_node": 8, "name": "ray"}


@pytest.mark.parametrize(
    ("flags", "path", "value"),
    [
        ("--advantage-estimator gspo --eps-clip 3e-4", "algo.eps_clip_high", 3e-4),
        ("--calculate-per-token-loss", "algo.aggregation", "token_mean"),
        ("--use-kl-loss --kl-loss-coef 0.001", "algo.kl_loss_coef", 0.001),
        ("--advantage-estimator ppo --kl-coef 0.1 --kl-loss-type k2", "algo.kl_reward_type", "k2"),
        ("--advantage-estimator ppo --gamma 0.9 --value-clip 0.5", "algo.value_clip", 0.5),
        ("--use-tis --tis-clip 3", "algo.corrections", [{"name": "tis", "tis_clip": 3.0, "tis_clip_low": 0.0}]),
        ("--use-opsm", "algo.corrections", [{"name": "opsm", "opsm_delta": 1e-4}]),
        ("--lr=2e-6", "train.lr", 2e-6),
        ("--rollout_temperature 0.7", "rollout.rollout_temperature", 0.7),
        ("--rollout-stop-token-ids 1 2", "rollout.rollout_stop_token_ids", [1, 2]),
        ("--partial-rollout", "rollout.max_staleness", 1000),
        ('--apply-chat-template-kwargs {"think":false}', "data.apply_chat_template_kwargs", {"think": False}),
        ("--eval-prompt-data a 1 --eval-prompt-data b 2", "eval.eval_prompt_data", ["a", "1", "b", "2"]),
        ("--save runs/one", "runs_dir", "runs"),
        ("--save runs/one/", "name", "one"),
        ("--sglang-mem-fraction-static 0.8", "engine.mem_fraction_static", 0.8),
        ("--sglang-server-concurrency 64", "rollout.concurrency", 64),
        ("--router-queue-size 9 --router-policy random", "engine.router_options", {"queue_size": 9}),
        ("--sglang-router-request-timeout-secs 360", "engine.request_timeout", 360.0),
        ("--router-policy random", "engine.router_policy", "random"),
        ("--tensor-model-parallel-size 2", "backend.tensor_model_parallel_size", 2),
        ("--moe-enable-deepep", "backend.moe_enable_deepep", True),
        ("--colocate --actor-num-gpus-per-node 4", "launcher.rollout_num_gpus", 4),
        ("--no-offload-train", "launcher.offload_train", False),
        ("--use-wandb --wandb-project p", "trackers", ["jsonl", {"name": "wandb", "wandb_project": "p"}]),
        ("--dynamic-sampling-filter-path slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
         "rollout.filters", ["nonzero_std"]),
        ("--num-layers 36 --swiglu --norm-epsilon 1e-6", "backend", "megatron"),
    ],
)  # fmt: skip
def test_flags_become_keys(translate, flags, path, value):
    tables, err, code = translate(flags)
    assert code == 0, err
    for key in path.split("."):
        tables = tables[key]
    assert tables == value


def test_train_async_runs_one_step_ahead(translate):
    assert translate("", entry="/root/slime/train_async.py")[0]["rollout"]["max_async_level"] == 1


def test_old_functions_get_the_flags_as_args_and_their_folder(translate):
    flags = (
        "--custom-rm-path my.reward --group-rm --custom-generate-function-path my.generate --reward-key acc --use-tis"
    )
    tables, _, code = translate(
        flags + " --wandb-key SECRET", entry="/root/slime/train.py", line=LINE.replace("--rm-type math", "")
    )
    assert code == 0
    reward, generate = tables["reward"], tables["generate"]
    assert (reward["name"], reward["path"], reward["group"], reward["python_path"]) == (
        "compat",
        "my.reward",
        True,
        ["/root/slime"],
    )
    assert reward["args"]["reward_key"] == "acc"
    assert reward["args"]["rollout_max_response_len"] == 8
    assert generate["missing_log_probs"] == "error"
    assert "SECRET" not in str(tables)


@pytest.mark.parametrize(
    ("flags", "path", "table"),
    [
        (
            "--rollout-function-path my.f --rollout-sample-filter-path my.g --rollout-all-samples-process-path my.h",
            "rollout.collector",
            {
                "name": "compat",
                "rollout_function_path": "my.f",
                "rollout_sample_filter_path": "my.g",
                "rollout_all_samples_process_path": "my.h",
            },
        ),
        (
            "--custom-reward-post-process-path my.f",
            "rollout.collector",
            {"name": "compat", "reward_post_process_path": "my.f"},
        ),
        (
            "--custom-convert-samples-to-train-data-path my.f",
            "rollout.collector",
            {"name": "compat", "convert_samples_to_train_data_path": "my.f"},
        ),
        (
            "--rollout-sample-hook-path my.f my.g",
            "generate",
            {
                "name": "compat",
                "path": "slime.rollout.sglang_rollout.generate",
                "missing_log_probs": "error",
                "sample_hook_paths": ["my.f", "my.g"],
            },
        ),
        ("--buffer-filter-path my.f", "rollout.buffer_filter", {"name": "compat_buffer", "path": "my.f"}),
        ("--data-source-path my.F --input-key q", "data", {"source": "compat", "path": "my.F", "input_key": "q"}),
        ("--custom-advantage-function-path my.f", "algo.advantage", {"name": "compat", "path": "my.f"}),
        (
            "--custom-advantage-function-path my.f --kl-coef 0.1",
            "algo.advantage",
            {"name": "compat_ref", "path": "my.f"},
        ),
        (
            "--custom-advantage-function-path my.f --advantage-estimator ppo",
            "algo.advantage",
            {"name": "compat_values", "path": "my.f"},
        ),
    ],
)
def test_hooks_by_path_become_plugins_that_call_them(translate, flags, path, table):
    tables, err, code = translate(flags, entry="/root/slime/train.py")
    assert (code, err) == (0, "")
    for key in path.split("."):
        tables = tables[key]
    assert tables.pop("python_path") == ["/root/slime"]
    assert tables.pop("args")["hf_checkpoint"] == "base"
    assert tables == table


def test_given_rewards_are_not_normalized_again(translate):
    algo = translate("--custom-reward-post-process-path my.f")[0]["algo"]
    assert algo["disable_rewards_normalization"] is True
    algo = translate("--custom-advantage-function-path my.f --kl-coef 0.1 --kl-loss-type k2")[0]["algo"]
    assert (algo["kl_coef"], algo["kl_reward_type"], algo["advantage"]["args"]["kl_coef"]) == (0.1, "k2", 0.1)


def test_functions_of_the_loss_become_corrections(translate):
    tables, _, code = translate(
        "--use-tis --custom-tis-function-path my.f --custom-pg-loss-reducer-function-path my.g --calculate-per-token-loss"
    )
    found = [{key: of[key] for key in of if key != "args"} for of in tables["algo"]["corrections"]]
    assert code == 0
    assert found == [
        {"name": "compat", "path": "my.f", "python_path": ["."]},
        {"name": "compat_reducer", "path": "my.g", "aggregation": "token_mean", "python_path": ["."]},
    ]
    _, err, _ = translate("--custom-tis-function-path my.f")
    assert "--custom-tis-function-path: left out, since it has no effect without --use-tis" in err


def test_an_eval_config_becomes_sets(translate, tmp_path):
    (tmp_path / "eval.yaml").write_text(
        """
eval:
  defaults: {max_response_len: 64, top_p: 0.7, no_stop_trim: true}
  datasets:
    - {name: aime, path: aime.jsonl, rm_type: deepscaler, n_samples_per_eval_prompt: 16, stop: END}
    - {name: own, path: own.jsonl, custom_rm_path: my.reward, app_service: "http://there"}
"""
    )
    tables, err, code = translate(f"--eval-config {tmp_path}/eval.yaml --eval-prompt-data left out.jsonl")
    assert code == 0
    table = tables["eval"]
    assert "eval_prompt_data" not in table
    assert table["defaults"] == {"max_response_len": 64, "top_p": 0.7}
    aime = {"path": "aime.jsonl", "reward": {"name": "deepscaler"}, "n_samples_per_eval_prompt": 16, "stop": ["END"]}
    assert table["datasets"]["aime"] == aime
    own = table["datasets"]["own"]
    assert (own["path"], own["reward"]["name"], own["reward"]["path"]) == ("own.jsonl", "compat", "my.reward")
    assert "--eval-config: own: app_service = 'http://there' is left out" in err
    (tmp_path / "eval.yaml").write_text("eval: {datasets: []}")
    _, err, _ = translate(f"--eval-config {tmp_path}/eval.yaml")
    assert "it has no sets with a name under eval.datasets" in err


def test_a_custom_config_sets_flags_and_args(translate, tmp_path):
    (tmp_path / "own.yaml").write_text("max_turns: 3\nlr: 1e-5\ntools: [a, b]\nuse_kl_loss: true\n")
    flags = f"--lr 1e-6 --custom-config-path {tmp_path}/own.yaml"
    tables, _, code = translate(flags + " --custom-generate-function-path my.generate")
    assert (tables["train"]["lr"], tables["algo"]["use_kl_loss"], code) == (1e-5, True, 0)
    assert (tables["generate"]["args"]["max_turns"], tables["generate"]["args"]["tools"]) == (3, ["a", "b"])
    _, err, code = translate(flags)
    assert code == 9
    assert "--max-turns: in --custom-config-path: not a flag, and no function of this run reads args" in err


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        (
            "--custom-loss-function-path my.loss",
            r"--custom-loss-function-path: .*write a loss \(slime.losses\), see slime-grpo",
        ),
        ("--rollout-data-postprocess-path my.f", r"--rollout-data-postprocess-path: .*observer, hook batch_ready"),
        (
            "--custom-reward-post-process-path my.f --advantage-estimator reinforce_plus_plus_baseline",
            r"--custom-reward-post-process-path: reinforce_plus_plus_baseline subtracts the group's mean",
        ),
        ("--keep-old-actor", r"--keep-old-actor: no copy of the weights that generated a rollout"),
        ("--rollout-batchsize 4", r"--rollout-batchsize: unknown flag; close match: --rollout-batch-size"),
        ("--enable-mtp-trainin", r"--enable-mtp-trainin: unknown flag; close match: --enable-mtp-training"),
        (
            "--rollout-functions-path my",
            r"--rollout-functions-path: unknown flag; close match: --rollout-function-path",
        ),
        ("--use-tiss", r"--use-tiss: unknown flag; close match: --use-tis"),
        ("--rm-type boxed_math", r"--rm-type: boxed_math: no reward of this name"),
        ("--hidden-dropout 0.1", r"--hidden-dropout: 0.1: dropout is not supported"),
        ("--lr fast", r'--lr: "fast": must be a number'),
        ("--eps-clip 0,2", r'--eps-clip: "0,2": must be a number'),
        ("--actor-num-nodes --colocate", r"--actor-num-nodes: requires a value"),
        ("--rollout-seed 4.5", r'--rollout-seed: "4.5": must be a number'),
        ("--hidden-dropout none", r'--hidden-dropout: "none": must be a number'),
        ("--lr-decay-style WSD", r"--lr-decay-style: WSD: must be constant, linear or cosine"),
        (
            "--ref-load other_torch_dist",
            r"--ref-load: other_torch_dist: no Hugging Face folder. Make one from the checkpoint with `slime convert`",
        ),
    ],
)
def test_left_out_flags_that_change_the_training_are_reported_with_exit_code_9(translate, flags, expected):
    _, err, code = translate(flags)
    assert re.search("CHANGES THE TRAINING  " + expected, err), err
    assert code == 9
    assert translate(flags, own=["--lenient"])[2] == 0


def test_left_out_flags_without_effect_are_reported_with_exit_code_0(translate):
    flags = "--attention-backend flash --kl-coef 0.1 --kl-loss-coef 0.1 --no-save-optim"
    tables, err, code = translate(flags)
    assert code == 0
    assert "CHANGES" not in err
    for flag in ("--attention-backend", "--kl-coef", "--kl-loss-coef", "--no-save-optim"):
        assert flag in err
    assert "kl_coef" not in tables["algo"]
    assert "kl_loss_coef" not in tables["algo"]


@pytest.mark.parametrize("prefix", ["--router-", "--sglang-router-"])
@pytest.mark.parametrize("installed", [True, False])
def test_options_of_the_router_keep_their_names(translate, monkeypatch, prefix, installed):
    """Options of an installed router are flags; otherwise they are checked on the machine that has it."""
    known = {name: ServerOption(name, kind, "Doc.") for name, kind in (("max_payload_size", int), ("dp_aware", bool))}
    monkeypatch.setattr("slime_sglang.router_args.router_options", lambda: known if installed else {})
    tables, err, code = translate(f"--router-policy cache_aware {prefix}max-payload-size 5 {prefix}dp-aware")
    assert (err, code) == ("", 0)
    assert tables["engine"] == {
        "name": "sglang",
        "router_policy": "cache_aware",
        "router_options": {"max_payload_size": 5, "dp_aware": True},
    }


def test_options_of_the_router_that_are_left_out_name_the_flags_here(translate, monkeypatch):
    known = {"max_payload_size": ServerOption("max_payload_size", int, "Doc.")}
    monkeypatch.setattr("slime_sglang.router_args.router_options", lambda: known)
    for flag in ("--router-max-payload-size", "--sglang-router-max-payload-size"):
        tables, err, code = translate(f"{flag} 5")
        assert (tables["engine"], code) == ("sglang", 0)
        assert f"{flag}: a router is started only with --router-policy" in err
        assert "pass --router-policy cache_aware and --router-max-payload-size, with --sglang-servers" in err
    _, err, _ = translate("--router-policy random --sglang-router-max-payload-sise 5 --router-prometheus-port 1")
    assert "has no --router-max-payload-sise that a run can set; close match: --router-max-payload-size" in err
    assert "--router-prometheus-port: the installed sglang-router has no --router-prometheus-port that" in err
    _, err, _ = translate("--router-policy random", own=["--engine", "local"])
    assert '--router-policy: an option of sglang-router; the engine is "local"' in err
    _, err, _ = translate("--prefill-num-servers 1 --sglang-router-port 3")
    assert "pass --sglang-servers, --sglang-prefill-servers and --router-policy" in err
    assert "--sglang-router-port: no foreign router is used" in err


def test_layouts_of_megatron_are_left_out_with_another_backend(translate):
    tables, err, code = translate(
        "--tensor-model-parallel-size 2 --lr 1e-5", own=["--backend", "fsdp", "--engine", "local"]
    )
    assert (tables["backend"], tables["engine"], code) == ("fsdp", "local", 0)
    assert '--tensor-model-parallel-size: an option of Megatron; the backend is "fsdp"' in err
    assert translate("--fp8-format e4m3", own=["--backend", "fsdp"])[2] == 9


def test_a_script_is_expanded_and_nothing_in_it_runs(tmp_path):
    marker = tmp_path / "touched"
    script = tmp_path / "run.sh"
    script.write_text(
        f"""set -e
pkill -9 nothing_of_this_name
rm -f {tmp_path}/run.sh; mkdir {marker}
ARGS=(--a "two words" ${{1:-none}})
cd "$(dirname "$0")"
PYTHONPATH=/x/y python3 -u slime/train.py "${{ARGS[@]}}" 2>&1 | tee {tmp_path}/log.txt
"""
    )
    line = from_script(script, ["first"])
    assert line.words == ("--a", "two words", "first")
    assert line.python_path == ("slime", "/x/y")
    assert script.exists()
    assert not marker.exists()
    assert not (tmp_path / "log.txt").exists()


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["translate"], "pass either a script or a launch line after --"),
        (["translate", "nowhere.sh"], "nowhere.sh: no such launch script"),
        (["translate", "--", "python3", "other.py"], "starts no train.py or train_async.py: python3 other.py"),
        (["translate", str(LAUNCH / "model.sh")], "it starts no train.py or train_async.py"),
    ],
)
def test_what_cannot_be_translated_is_reported_in_one_message(words, expected, capsys):
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err
