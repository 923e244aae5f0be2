"""Launch lines and scripts to run files."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from slime_compat import command, megatron_flags, plugin_keys
from slime_compat.launch_line import from_script
from slime_core.cli.main import main
from slime_core.config.chosen import Finder, algo_flags, chosen_flags
from slime_core.registry import Registry

LAUNCH = Path(__file__).parent / "launch"
LINE = (
    "--hf-checkpoint base --prompt-data train.jsonl --rm-type math --rollout-batch-size 4 --rollout-max-response-len 8"
)


@pytest.fixture
def slime(monkeypatch):
    """`slime(word, ...)` runs the command."""

    def run(*words):
        monkeypatch.setattr("sys.argv", ["slime", *words])
        main()

    return run


@pytest.fixture
def translate(capsys, slime):
    """`translate(flags, ...)` gives the tables, what is on stderr, and the exit code."""

    def run(flags, *, own=(), entry="train.py", line=LINE):
        with pytest.raises(SystemExit) as ended:
            slime("compat", *own, "--", "python3", entry, *line.split(), *flags.split())
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
        ("--lr-warmup-fraction 0.1", "train.lr_warmup_fraction", 0.1),
        ("--load-debug-rollout-data d/{rollout_id}.pt", "train.debug_train_only", True),
        ("--load-debug-rollout-data d/{rollout_id}.pt --load-debug-rollout-data-subsample 0.5", "rollout.collector",
         {"name": "compat_dump", "path": "d/{rollout_id}.pt", "subsample": 0.5}),
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
        # Left out if the flags of the shape are those of a dense model.
        ("--num-layers 36 --moe-token-dispatcher-type alltoall --moe-aux-loss-coeff 0.1", "backend", "megatron"),
        ("--num-layers 36 --num-experts 8 --moe-token-dispatcher-type alltoall", "backend.moe_token_dispatcher_type",
         "alltoall"),
        # 12 + 12 + 12 + 11.
        ("--num-layers 47 --pipeline-model-parallel-size 4", "backend",
         {"name": "megatron", "num_layers_in_last_pipeline_stage": 11, "pipeline_model_parallel_size": 4}),
        ("--num-layers 47 --pipeline-model-parallel-size 2 --decoder-last-pipeline-num-layers 20", "backend",
         {"name": "megatron", "num_layers_in_last_pipeline_stage": 20, "pipeline_model_parallel_size": 2}),
        # 2 + 2 + 2 would leave none for the last one.
        ("--num-layers 6 --pipeline-model-parallel-size 4", "backend",
         {"name": "megatron", "pipeline_model_parallel_size": 4}),
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


GLM = """
sglang:
  - name: default
    server_groups:
      - {worker_type: prefill, num_gpus: 4, num_gpus_per_engine: 2, overrides: {chunked_prefill_size: 131072}}
      - {worker_type: decode, num_gpus: 8, num_gpus_per_engine: 2, overrides: {max_running_requests: 8}}
"""
SERVED = """
sglang:
  - name: actor
    num_gpus_per_engine: 4
    engine_groups:
      - {worker_type: regular, num_gpus: 8, overrides: {mem_fraction_static: 0.7}}
  - name: reward
    model_path: judge
    server_groups:
      - {worker_type: regular, num_gpus: 2, overrides: {max_running_requests: 4}}
  - name: ref
    model_path: other
    server_groups: [{worker_type: regular, num_gpus: 1}]
"""


def test_groups_of_servers_become_engines(translate, tmp_path):
    (tmp_path / "glm.yaml").write_text(GLM)
    flags = f"--rollout-num-gpus 12 --rollout-num-gpus-per-engine 1 --sglang-config {tmp_path}/glm.yaml"
    tables, err, code = translate(flags)
    assert (code, err) == (0, "")
    # Two engines of one server that prefills and two that decode, on two GPUs each.
    assert tables["engine"] == {
        "name": "sglang",
        "servers": 3,
        "prefill_servers": 1,
        "prefill_options": {"chunked_prefill_size": 131072},
        "decode_options": {"max_running_requests": 8},
        "router_policy": "cache_aware",
    }
    launcher = tables["launcher"]
    assert (launcher["rollout_num_gpus"], launcher["rollout_num_gpus_per_engine"]) == (12, 6)

    (tmp_path / "served.yaml").write_text(SERVED)
    tables, err, _ = translate(f"--sglang-mem-fraction-static 0.9 --sglang-config {tmp_path}/served.yaml")
    launcher = tables["launcher"]
    assert (launcher["rollout_num_gpus"], launcher["rollout_num_gpus_per_engine"]) == (8, 4)
    assert tables["engine"] == {"name": "sglang", "mem_fraction_static": 0.7}
    assert tables["engines"] == {
        "reward": {
            "load": "judge",
            "num_gpus": 2,
            "num_gpus_per_engine": 1,
            "engine": {"name": "sglang", "max_running_requests": 4},
        }
    }
    assert "model ref: only engines.teacher and engines.reward are served beside the trained model" in err


@pytest.mark.parametrize(
    ("groups", "expected"),
    [
        ("[{worker_type: encoder, num_gpus: 1}]", "worker_type encoder: only regular, prefill, decode are started"),
        ("[{worker_type: prefill, num_gpus: 2}]", "only one regular group, or one of prefill and one of decode"),
        (
            "[{worker_type: prefill, num_gpus: 2, num_gpus_per_engine: 2}, {worker_type: decode, num_gpus: 4}]",
            "num_gpus_per_engine [1, 2]: servers of one engine have equal shares of its devices",
        ),
        ("[{worker_type: regular, num_gpus: 3, num_gpus_per_engine: 2}]", "num_gpus 3 is not a multiple of"),
        ("[{worker_type: regular, gpus: 3}]", "cannot be read: .*server_groups.0.num_gpus Field required"),
        ("5", "cannot be read"),
    ],
)
def test_groups_without_a_counterpart_are_named(translate, tmp_path, groups, expected):
    (tmp_path / "own.yaml").write_text(f"sglang:\n  - name: a\n    server_groups: {groups}\n")
    _, err, code = translate(f"--sglang-config {tmp_path}/own.yaml")
    assert code == 0
    assert re.search(expected if ".*" in expected else re.escape(expected), err), err
    assert f"--sglang-config: {tmp_path}/own.yaml: " in err


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
        (
            "--custom-megatron-init-path my.f --custom-megatron-before-log-prob-hook-path my.g "
            "--custom-megatron-before-train-step-hook-path my.h",
            "backend.hooks",
            {
                "name": "compat",
                "megatron_init_path": "my.f",
                "megatron_before_log_prob_hook_path": "my.g",
                "megatron_before_train_step_hook_path": "my.h",
            },
        ),
        (
            "--update-weight-transport disk --custom-update-weight-post-write-path my.f",
            "sync.post_write_hook",
            {"name": "compat", "path": "my.f"},
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


def test_a_loss_function_takes_the_place_of_the_policy_loss(translate):
    """With its terms: upstream's own loss adds KL, entropy and corrections itself."""
    flags = (
        "--loss-type custom_loss --custom-loss-function-path my.loss --use-kl-loss --kl-loss-coef 0.1 --entropy-coef 0.01 "
        "--use-tis --eps-clip 0.3 --disable-grpo-std-normalization"
    )
    tables, err, code = translate(flags)
    assert (code, err) == (0, "")
    loss = tables["algo"].pop("loss")
    assert tables["algo"] == {"name": "grpo", "aggregation": "seq_mean", "disable_grpo_std_normalization": True}
    args = loss.pop("args")
    assert loss == {"name": "compat_ref", "path": "my.loss", "python_path": ["."]}
    read = ("kl_loss_coef", "entropy_coef", "eps_clip", "eps_clip_high", "use_tis", "kl_loss_type")
    assert [args[name] for name in read] == [0.1, 0.01, 0.3, 0.3, True, "k1"]
    _, err, code = translate("--custom-loss-function-path my.loss")
    assert code == 0
    assert "--custom-loss-function-path: left out, since it has no effect without --loss-type custom_loss" in err


def test_hooks_of_trainers_get_the_flags_of_megatron_too(translate):
    flags = "--custom-megatron-init-path my.f --num-layers 36 --tensor-model-parallel-size 2 --wandb-key SECRET"
    tables, _, code = translate(flags)
    args = tables["backend"]["hooks"]["args"]
    assert (code, args["num_layers"], args["tensor_model_parallel_size"]) == (0, 36, 2)
    assert "SECRET" not in str(tables)
    assert (
        "num_layers"
        not in translate("--custom-advantage-function-path my.f --num-layers 36")[0]["algo"]["advantage"]["args"]
    )


def test_a_post_write_hook_without_files_has_no_effect(translate):
    tables, err, code = translate("--custom-update-weight-post-write-path my.f")
    assert (code, "sync" in tables) == (0, False)
    assert (
        "--custom-update-weight-post-write-path: left out, since it has no effect without --update-weight-transport"
        in err
    )


def test_hooks_of_megatron_with_another_backend_are_left_out(translate):
    _, err, code = translate("--custom-megatron-init-path my.f", own=["--backend", "fsdp", "--engine", "local"])
    assert code == 9
    assert '--custom-megatron-init-path: a hook of Megatron; the backend is "fsdp"' in err


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
        ("--loss-type custom_loss", r"--loss-type: custom_loss: no such loss here; write one"),
        ("--rollout-data-postprocess-path my.f", r"--rollout-data-postprocess-path: .*observer, hook batch_ready"),
        (
            "--custom-reward-post-process-path my.f --advantage-estimator reinforce_plus_plus_baseline",
            r"--custom-reward-post-process-path: reinforce_plus_plus_baseline subtracts the group's mean",
        ),
        ("--custom-model-provider-path my.f", r"--custom-model-provider-path: the function's model .* write a bridge"),
        (
            "--custom-megatron-before-log-prob-hook-path "
            "slime.backends.megatron_utils.alignment.deepgemm_forward.enable_deepgemm_all_forward",
            r"--custom-megatron-before-log-prob-hook-path: slime\.backends.*: it replaces layers of Transformer Engine",
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
        ("--load other", r"--load: other: weights are loaded from base. If other has others, convert it with"),
        ("--fp8-format e4m3", r"--fp8-format: training in float8 uses layers of Transformer Engine"),
        ("--loss-type sft_loss --loss-mask-type distill_qwen", r"--loss-mask-type: distill_qwen: the last response is"),
        (
            "--ref-load base_torch_dist --ref-ckpt-step 9",
            r"--ref-ckpt-step: upstream starts the policy from this step too",
        ),
        ("--megatron-config-path nowhere.yaml", r"--megatron-config-path: nowhere.yaml: FileNotFoundError"),
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
def test_options_of_the_router_keep_their_names(translate, prefix):
    tables, err, code = translate(f"--router-policy cache_aware {prefix}max-payload-size 5 {prefix}dp-aware")
    assert (err, code) == ("", 0)
    assert tables["engine"] == {
        "name": "sglang",
        "router_policy": "cache_aware",
        "router_options": {"max_payload_size": 5, "dp_aware": True},
    }


def test_options_of_the_router_that_are_left_out_name_the_flags_here(translate):
    for flag in ("--router-max-payload-size", "--sglang-router-max-payload-size"):
        tables, err, code = translate(f"{flag} 5")
        assert (tables["engine"], code) == ("sglang", 0)
        assert f"{flag}: a router is started only with --router-policy" in err
        assert "pass --router-policy cache_aware and --router-max-payload-size, with --sglang-servers" in err
    _, err, _ = translate("--router-policy random", own=["--engine", "local"])
    assert '--router-policy: an option of SGLang; the engine is "local"' in err
    _, err, _ = translate("--prefill-num-servers 1 --sglang-router-port 3")
    assert "--prefill-num-servers: 1: requires a --rollout-num-gpus that is a multiple of" in err
    assert "--sglang-router-port: no foreign router is used" in err


def test_servers_that_prefill_are_servers_of_one_engine(translate):
    flags = "--prefill-num-servers 1 --rollout-num-gpus 8 --rollout-num-gpus-per-engine 2"
    tables, err, code = translate(flags)
    assert (err, code) == ("", 0)
    assert tables["engine"] == {
        "name": "sglang",
        "servers": 4,
        "prefill_servers": 1,
        "router_policy": "cache_aware",
    }
    assert tables["launcher"]["rollout_num_gpus_per_engine"] == 8


@pytest.mark.parametrize(
    ("flags", "path", "value"),
    [
        ("--sglang-cuda-graph-bs 16", "engine.cuda_graph_bs", [16]),
        ("--sglang-expert-parallel-size 8", "engine.ep_size", 8),
        ("--sglang-enable-deterministic-inference", "engine.deterministic", True),
        ("--moe-aux-loss-coeff 0.1", "backend", {
            "name": "megatron", "moe_router_load_balancing_type": "aux_loss", "moe_aux_loss_coeff": 0.1}),
        ("--moe-aux-loss-coeff 0", "backend", {"name": "megatron", "moe_aux_loss_coeff": 0.0}),
        ("--no-gradient-accumulation-fusion", "backend.gradient_accumulation_fusion", False),
        ("--decoder-last-pipeline-num-layers 5", "backend.num_layers_in_last_pipeline_stage", 5),
        ("--lr-warmup-fraction 0.1", "train.lr_warmup_fraction", 0.1),
        ("--eval-prompt-data one.jsonl", "eval.eval_prompt_data", ["aime", "one.jsonl"]),
        ("--disable-grpo-std-normalization", "algo.disable_grpo_std_normalization", True),
        ("--loss-type sft_loss", "rollout.rollout_max_response_len", 8),
        ("--opd-teacher-load large_torch_dist", "model.opd_teacher_load", "large"),
        ("--ref-load large", "model.ref_load", "large"),
        ("--opd-teacher-load t_torch_dist --opd-teacher-ckpt-step 40", "model.opd_teacher_load", "t_torch_dist/iter_0000040"),
        ("--ref-load elsewhere/base_torch_dist", "model", {"hf_checkpoint": "base"}),
    ],
)  # fmt: skip
def test_flags_of_the_tables(translate, flags, path, value):
    tables, err, code = translate(flags)
    assert code == 0, err
    for key in path.split("."):
        tables = tables[key]
    assert tables == value


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ("--moe-token-drop-policy probs", "it has no effect without --moe-expert-capacity-factor"),
        ("--loss-mask-type qwen3_5", "it has no effect without --loss-type sft_loss"),
        ("--gamma 0.9", "left out, since it has no effect with grpo upstream"),
        ("--save runs/one --load old/one", "old/one: an earlier start of the run of --save"),
    ],
)
def test_flags_without_an_effect_upstream_are_left_out_with_a_note(translate, flags, expected):
    _, err, code = translate(flags)
    assert code == 0, err
    assert expected in err


def test_engines_load_the_quantized_folder_of_the_model_that_is_trained(translate):
    line = LINE.replace("--hf-checkpoint base", "--hf-checkpoint a/Qwen3-4B-FP8")
    tables, err, code = translate("--ref-load b/Qwen3-4B_torch_dist", line=line)
    assert code == 0
    assert tables["model"] == {"hf_checkpoint": "b/Qwen3-4B", "rollout_load": "a/Qwen3-4B-FP8"}
    assert "a/Qwen3-4B-FP8 is what the engines load; b/Qwen3-4B, of which b/Qwen3-4B_torch_dist is made, is what" in err


def test_a_teacher_on_a_server_of_its_own(translate):
    flags = (
        "--use-opd --opd-type sglang --opd-kl-coef 0.5 --rm-url http://10.0.0.2:30000/generate "
        "--custom-rm-path slime.rollout.on_policy_distillation.reward_func "
        "--custom-reward-post-process-path slime.rollout.on_policy_distillation.post_process_rewards"
    )
    tables, err, code = translate(flags, line=LINE.replace("--rm-type math", ""))
    assert code == 0, err
    assert (tables["algo"]["name"], tables["algo"]["opd_kl_coef"]) == ("opd", 0.5)
    engine = {"name": "sglang", "external_engine_addrs": ["10.0.0.2:30000"]}
    assert tables["engines"]["teacher"] == {"load": "base", "engine": engine}
    assert "reward" not in tables
    assert "Set engines.teacher.load to the folder of its model" in err


def test_options_of_roles_come_from_their_file(translate, tmp_path):
    (tmp_path / "roles.yaml").write_text(
        "megatron:\n- {name: a, role: actor, overrides: {lr: 1e-6}}\n- {name: a, role: critic, overrides: {lr: 1.0e-5}}\n"
    )
    tables, err, code = translate(f"--advantage-estimator ppo --lr 1 --megatron-config-path {tmp_path}/roles.yaml")
    assert code == 0, err
    assert (tables["train"]["lr"], tables["roles"]["critic"]) == (1e-6, {"lr": 1e-5})


def test_upstreams_example_of_a_correction_is_the_correction_mis(translate, tmp_path):
    (tmp_path / "mis.yaml").write_text("use_tis: true\nuse_rs: true\ntis_mode: clip\nrs_lower_bound: null\n")
    flags = (
        "--custom-tis-function-path examples.train_infer_mismatch_helper.mis.compute_mis_weights_with_cp "
        f"--custom-config-path {tmp_path}/mis.yaml"
    )
    tables, err, code = translate(flags)
    assert code == 0, err
    assert tables["algo"]["corrections"] == [{"name": "mis", "use_rs": True, "tis_mode": "clip"}]


def test_a_generate_function_may_score_its_samples(translate):
    line = LINE.replace("--rm-type math", "")
    tables, err, code = translate("--custom-generate-function-path my.generate", line=line)
    assert (err, code) == ("", 0)
    assert tables["reward"] == {"name": "compat", "path": "slime_compat.generated_reward.reward"}


def test_what_is_installed_has_no_influence():
    """Translating imports no other plugin, no Megatron and no SGLang."""
    code = (
        "import sys\n"
        "from slime_compat.command import translated\n"
        "from slime_compat.launch_line import from_words\n"
        "line = from_words(['train.py', '--hf-checkpoint', 'm', '--tensor-model-parallel-size', '2', '--gamma', '1'])\n"
        "translated(line)\n"
        "print(sorted({name.partition('.')[0] for name in sys.modules if name.startswith(('slime', 'megatron', 'sglang'))}))\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert ended.stdout == "['slime_compat', 'slime_core']\n"


def test_the_tables_have_the_keys_of_the_plugins():
    """An option that a plugin renames must be renamed in the tables."""
    registry = Registry.from_environment()
    for flag, (_, readers) in plugin_keys.OF_ALGORITHM.items():
        found = {
            name
            for name in plugin_keys.OF_ALGORITHM["eps-clip-c"][1] | {"gspo", "cispo"}
            if flag in {known.name for known in algo_flags({"algo": name}, Finder(registry, strict=True))}
        }
        assert found == readers, flag
    options = {flag.name for flag in chosen_flags({}, registry)}
    assert {"prompt-data", "rollout-shuffle"} <= options
    tables = {"backend": {"name": "megatron"}, "engine": {"name": "sglang"}}
    known = {flag.path for flag in chosen_flags(tables, registry)}
    own = {
        "context-parallel-size",
        "log-probs-chunk-size",
        "mtp-loss-scaling-factor",
        "only-train-params-name-list",
        "sequence-parallel",
        "virtual-pipeline-model-parallel-size",
    }
    assert {("backend", option.replace("-", "_")) for option in own & set(megatron_flags.OPTIONS)} <= known
    assert {tuple(key.split(".")) for key, _ in plugin_keys.KEYS.values() if key.startswith("engine.")} <= known
    assert len(own & set(megatron_flags.OPTIONS)) == len(own)


@pytest.mark.megatron
def test_every_option_of_megatron_in_the_tables_is_one_of_the_installed():
    tables = {"backend": {"name": "megatron"}}
    known = {
        flag.path[1]: flag for flag in chosen_flags(tables, Registry.from_environment()) if flag.path[0] == "backend"
    }
    for option in megatron_flags.OPTIONS:
        flag = known[option.replace("-", "_")]
        assert not flag.field.exclude, option


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


def test_a_launch_line_without_a_backslash_is_joined_and_noted(tmp_path, capsys, slime):
    script = tmp_path / "run.sh"
    script.write_text(
        "ARGS=(--lr 1)\nset -e\npython3 train.py --hf-checkpoint base\n  ${ARGS[@]} \\\n  --rm-type math\n"
    )
    line = from_script(script, [])
    assert line.words == ("--hf-checkpoint", "base", "--lr", "1", "--rm-type", "math")
    with pytest.raises(SystemExit):
        slime("compat", str(script))
    assert "a backslash is missing at the end of one of its lines" in capsys.readouterr().err
    script.write_text("python3 train.py --hf-checkpoint base\necho -- --lr 1\n")
    assert not from_script(script, []).is_joined


def test_a_script_may_use_what_programs_print_that_are_not_run(tmp_path, monkeypatch):
    """Under errexit and pipefail; files with names from mktemp are written, and read by the translation."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    script = tmp_path / "run.sh"
    script.write_text(
        """set -euo pipefail
FOUND=$(pip list | grep megatron-core | head -1)
CONFIG=$(mktemp /tmp/config_XXXX.yaml)
cat > "$CONFIG" <<END
lr: 1e-5
END
ENV=$(python3 - <<END
print(1)
END
)
ray job submit --runtime-env-json="$ENV" -- python3 train.py --custom-config-path $CONFIG
"""
    )
    line = from_script(script, [])
    flag, config = line.words
    assert (flag, line.is_env_unread) == ("--custom-config-path", True)
    assert config.startswith(f"{tmp_path}/slime-compat.")
    assert Path(config).suffix == ".yaml"
    assert Path(config).read_text() == "lr: 1e-5\n"


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["nowhere.sh"], "nowhere.sh: no such launch script"),
        (["upstream", "nowhere.sh"], "nowhere.sh: no such launch script"),
        (["--", "python3", "other.py"], "python3 other.py: neither a launch script nor a line that starts train.py or"),
        ([str(LAUNCH / "model.sh")], "it starts no train.py or train_async.py"),
    ],
)
def test_what_cannot_be_translated_is_reported_in_one_message(slime, words, expected, capsys):
    with pytest.raises(SystemExit) as ended:
        slime("compat", *words)
    assert ended.value.code == 2
    assert expected in capsys.readouterr().err


def test_the_command_of_0_2_is_the_command_of_today(monkeypatch, capsys):
    line = ["--", "python3", "train.py", *LINE.split()]
    printed = {}
    for name, starts, words in (
        ("today", main, ["slime", "compat", *line]),
        ("0.2", command.main, ["slime-compat", "translate", *line]),
    ):
        monkeypatch.setattr("sys.argv", words)
        with pytest.raises(SystemExit):
            starts()
        printed[name] = capsys.readouterr()
    assert printed["today"].out == printed["0.2"].out
    assert printed["0.2"].err == "slime-compat translate is now slime compat; the old name works until 0.4.\n"
