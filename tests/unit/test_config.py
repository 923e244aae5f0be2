"""Run files and flags to a bound run: precedence, paths, parts of an algorithm, and every problem."""

import json
import os
import re
from dataclasses import asdict

import pytest

from slime_core.config.load import read_run_file
from slime_core.contracts.engine import Capability
from slime_core.controller.manifest import build_manifest
from slime_core.controller.run_changes import ChangeKind, changes_since
from slime_core.errors import ConfigError
from slime_core.registry.install_hints import install_hint


@pytest.fixture
def complaints(bound):
    def problems_of(*flags, **how):
        with pytest.raises(ConfigError) as caught:
            bound(*flags, **how)
        return caught.value.problems

    return problems_of


def only(problems, pattern):
    assert len(problems) == 1, problems
    assert re.search(pattern, problems[0]), problems[0]


# --- Precedence and paths ---------------------------------------------------------------------------------------------


def test_file_defaults_flags_and_set(bound):
    run = bound("--lr", "1e-4", "--set", "train.clip_grad=0.5", "--no-balance-data", "--rollout-temperature", "0.7")
    assert run.config.train.lr == 1e-4
    assert run.config.train.clip_grad == 0.5
    assert run.config.train.balance_data is False
    assert run.config.rollout.rollout_temperature == 0.7
    assert run.config.train.num_rollout == 3  # the file
    assert run.config.train.weight_decay == 0.1  # the default


def test_flags_win_over_the_file_and_the_last_one_wins(bound):
    assert bound("--num-rollout", "5").config.train.num_rollout == 5
    assert bound("--num-rollout", "5", "--set", "train.num_rollout=6").config.train.num_rollout == 6
    assert bound("--set", "train.num_rollout=6", "--num-rollout", "5").config.train.num_rollout == 5


def test_paths_in_the_file_are_relative_to_it_and_in_flags_to_the_working_directory(bound, tmp_path, monkeypatch):
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    run = bound("--runs-dir", "out", "--eval-prompt-data", "held_out", "test.jsonl@[0:2]", "--warm-start", "w")
    assert run.config.model.hf_checkpoint == str(tmp_path / "base")
    assert run.source.config.prompt_data[0].path == str(tmp_path / "train.jsonl")
    assert run.config.runs_dir == str(elsewhere / "out")
    assert run.evals[0].path == str(elsewhere / "test.jsonl@[0:2]")
    assert run.backend.config.warm_start == str(elsewhere / "w")
    again = bound("--set", "data.prompt_data=['a.jsonl']", extra="backend.warm_start = 'w'\n", text=dotted())
    assert again.source.config.prompt_data[0].path == str(elsewhere / "a.jsonl")
    assert again.backend.config.warm_start == str(tmp_path / "w")


def dotted():
    """The run file with room for single keys of the backend."""
    from_file = """
        backend.name = "fake"
        name = "tiny"
        plugin = ["fakes.py"]
        model = { hf_checkpoint = "base" }
        engine = "fake"
        reward = "one"
        algo = "grpo"
        data = { prompt_data = ["train.jsonl"] }
        rollout = { rollout_batch_size = 4, n_samples_per_prompt = 8, rollout_max_response_len = 16 }
        train = { num_rollout = 3, global_batch_size = 32 }
    """
    return "\n".join(line.strip() for line in from_file.splitlines()) + "\n"


def test_runs_dir_is_in_the_working_directory_by_default(bound, tmp_path, monkeypatch):
    monkeypatch.chdir(os.path.abspath("/"))
    assert bound().config.runs_dir == "runs"


def test_flags_convert_like_the_file(bound):
    run = bound(
        "--launcher", "ray", "--colocate", "--aggregation", "token_mean", "--refill", "eager", "--rollout-stop", "a", "b",
        "--rollout-stop-token-ids", "3,4", "--fake-mem-fraction-static", "0.5", "--bucket-bytes", "64",
        "--tensor-model-parallel-size", "2", "--recompute", "--trackers", "jsonl",
    )  # fmt: skip
    assert run.config.launcher.name == "ray"
    assert run.config.launcher.colocate is True
    assert run.algo.keys.aggregation == "token_mean"
    assert run.config.rollout.rollout_stop == ("a", "b")
    assert run.config.rollout.rollout_stop_token_ids == (3, 4)
    assert run.engine.config.mem_fraction_static == 0.5
    assert run.transport.config.bucket_bytes == 64
    assert run.backend.config.recompute is True
    assert run.num_ranks == 2
    assert [part.name for part in run.trackers] == ["jsonl"]


# --- Complaints -------------------------------------------------------------------------------------------------------


def test_a_run_file_that_cannot_be_read(tmp_path):
    (tmp_path / "other.toml").write_text("")
    with pytest.raises(ConfigError, match=r"no such run file\. There is: .*other\.toml"):
        read_run_file(tmp_path / "run.toml")
    (tmp_path / "run.toml").write_text("a = [1,\nb = 2")
    with pytest.raises(ConfigError, match=r"not valid TOML: .*line 2"):
        read_run_file(tmp_path / "run.toml")


def test_unknown_keys_name_the_nearest(complaints):
    only(complaints(extra="[rollouts]\nx = 1\n"), r"^rollouts: unknown option; close match: rollout\b")
    problems = complaints("--set", "train.lrr=1", "--set", "algo.eps_clip_hihg=0.3", "--set", "backend.recomptue=true")
    # The kernel's tables come first; the rest is bound once they are right.
    only(problems, r"^train\.lrr: unknown option; close match: lr")
    problems = complaints("--set", "algo.eps_clip_hihg=0.3", "--set", "backend.recomptue=true", "--engine", "fakee")
    assert len(problems) == 3
    of_algo = r'^algo\.eps_clip_hihg: no part of "grpo" \(.*clip.*\) has this option; close match: eps_clip_high'
    assert re.search(of_algo, problems[0])
    assert re.search(r"^backend\.recomptue: unknown option; close match: recompute", problems[1])
    assert re.search(r'^engine\.name = "fakee": unknown.*close match: fake', problems[2])


def test_unknown_flags_and_wrong_values_are_reported_together(complaints):
    problems = complaints("--rolout-batch-size", "3", "--lr", "-1", "--refill", "sometimes", "--num-rollout", "many")
    text = "\n".join(problems)
    assert len(problems) == 4
    assert "--rolout-batch-size: unknown flag; close match: --rollout-batch-size" in text
    assert re.search(r'train\.lr = "-1": input should be greater than 0', text)
    assert re.search(r"rollout\.refill = \"sometimes\": input should be 'drained' or 'eager'", text)
    assert re.search(r'train\.num_rollout = "many": input should be a valid integer', text)


def test_missing_tables_and_keys(complaints, bound):
    problems = complaints(text='name = "a"\n[rollout]\nrollout_batch_size = 1\n')
    missing = {"model", "backend", "engine", "algo", "train", "rollout.rollout_max_response_len"}
    assert {line.split(":")[0] for line in problems} == missing
    assert all("is missing" in line for line in problems)


def test_a_name_that_cannot_be_a_folder(complaints):
    only(complaints("--name", "../out"), r'^name = "\.\./out": ')


# --- Parts of an algorithm --------------------------------------------------------------------------------------------


def test_a_recipe_gives_its_parts_their_options(bound):
    run = bound("--algo", "dapo")
    assert run.algo.loss.name == "clip"
    assert run.algo.loss.config.eps_clip_high == 0.28
    assert run.algo.keys.aggregation == "token_mean"
    assert [part.name for part in run.filters] == ["nonzero_std"]


def test_the_run_file_wins_over_the_recipe(bound):
    run = bound("--algo", "dapo", "--eps-clip-high", "0.5", "--aggregation", "seq_mean")
    assert run.algo.loss.config.eps_clip_high == 0.5
    assert run.algo.loss.config.eps_clip == 0.2
    assert run.algo.keys.aggregation == "seq_mean"


def test_a_part_in_anothers_place_does_not_inherit_the_recipes_options(bound):
    run = bound("--algo", "dapo", "--loss", "cispo")
    assert run.algo.loss.config.eps_clip_high == 4.0
    run = bound("--algo", "dapo", "--loss", "cispo", "--eps-clip-high", "3")
    assert run.algo.loss.config.eps_clip_high == 3.0
    assert run.algo.loss.config.eps_clip == 1.0


def test_options_of_a_replaced_part_are_flags_too(bound):
    run = bound("--loss", "sequence_clip", "--token-level")
    assert run.algo.loss.config.token_level is True


def test_options_may_stand_in_the_parts_own_table(bound, complaints):
    run = bound("--set", "algo.loss={ name = 'clip', eps_clip = 0.4 }", "--eps-clip", "0.3")
    assert run.algo.loss.config.eps_clip == 0.4
    only(complaints("--set", "algo.loss={ name = 'clip', eps = 1 }"), r"^algo\.loss\.eps: unknown option")


def test_an_option_of_no_part(complaints):
    only(complaints("--set", "algo.gamma=0.9"), r'^algo\.gamma: no part of "grpo" \(clip, group_norm\) has this option')
    only(complaints("--set", "algo.lamda=1", "--algo", "gspo"), r"sequence_clip")


def test_an_unknown_part(complaints):
    only(complaints("--loss", "clipp"), r'^algo\.loss = "clipp": unknown.*close match: clip')
    only(complaints("--filters", "nonzero-std"), r"rollout\.filters\[0\]")
    only(complaints("--algo", "grp0"), r'^algo\.name = "grp0": unknown.*close match: grpo')


def test_a_filter_that_the_file_names_too_is_there_once(bound):
    run = bound("--algo", "dapo", "--filters", "nonzero_std")
    assert [part.name for part in run.filters] == ["nonzero_std"]


# --- Cross-checks -----------------------------------------------------------------------------------------------------


def test_batch_arithmetic(bound, complaints):
    run = bound()
    assert (run.rollouts_per_batch, run.global_batch_size, run.steps_per_rollout) == (32, 32, 1)
    run = bound("--global-batch-size", "8")
    assert run.steps_per_rollout == 4
    run = bound("--set", "train={ num_rollout = 1, num_steps_per_rollout = 2 }")
    assert (run.global_batch_size, run.steps_per_rollout) == (16, 2)
    product = "rollout_batch_size 4 x n_samples_per_prompt 8 = 32"
    only(
        complaints("--global-batch-size", "12"),
        f"{product} is not a multiple of global_batch_size 12. Nearest that fit: 8 and 16\\.",
    )
    only(complaints("--global-batch-size", "64"), r"Nearest that fit: 32\.")
    only(
        complaints("--set", "train={ num_rollout = 1, num_steps_per_rollout = 3 }"),
        f"{product} does not divide by num_steps_per_rollout 3. Nearest that fit: 2 and 4\\.",
    )
    only(
        complaints("--num-steps-per-rollout", "4"),
        r"but global_batch_size 32 x num_steps_per_rollout 4 = 128\. Give only one of the two",
    )
    only(complaints("--over-sampling-batch-size", "3"), "set 4 or more, or leave it out")


def test_the_kl_goes_into_the_reward_or_into_the_loss(complaints):
    problems = complaints("--kl-coef", "0.1", "--kl-loss-coef", "0.2", "--kl-reward-type", "k1")
    assert "not both" in problems[0]
    only(complaints("--kl-coef", "0.1", "--kl-reward-type", "k1"), 'advantage "group_norm" takes no KL in the reward')


def test_a_kl_loss_needs_no_switch(bound):
    assert bound("--kl-loss-coef", "0.1").algo.kl_loss.name == "k3"
    assert bound("--use-kl-loss", "--kl-loss-type", "k2").algo.kl_loss.name == "k2"
    assert bound().algo.kl_loss is None


def test_sampling_from_a_cut_distribution_needs_the_kept_ids(complaints):
    problems = complaints("--rollout-top-p", "0.9", "--rollout-top-k", "20")
    assert len(problems) == 2
    assert problems[0].startswith(
        "rollout.rollout_top_p = 0.9: log-probs of a cut distribution need the kept token ids"
    )
    assert "Use rollout_top_k = -1." in problems[1]


def test_one_sample_per_prompt_gives_a_group_baseline_nothing_to_compare(bound, complaints):
    one = ("--n-samples-per-prompt", "1", "--global-batch-size", "4")
    only(complaints(*one), r"compares the samples of one prompt.*--n-samples-per-prompt 2 or more")
    assert bound(*one, "--disable-rewards-normalization").rollouts_per_batch == 4


def test_the_local_launcher_has_one_rank(bound, complaints):
    two = ("--tensor-model-parallel-size", "2")
    only(complaints(*two), "2 are requested. Pass --launcher ray")
    assert bound(*two, "--launcher", "ray").num_ranks == 2
    assert bound("--launcher", "ray", "--actor-num-gpus-per-node", "4", "--actor-num-nodes", "2").num_ranks == 8


def test_an_engine_over_several_machines(complaints):
    asked = ("--num-gpus-per-node", "4", "--rollout-num-gpus-per-engine")
    only(complaints("--launcher", "ray", *asked, "8"), 'num_gpus_per_node = 4: engine "fake" stays on one machine')
    given = complaints(*asked, "6")
    assert all("rollout_num_gpus_per_engine = 6, but a machine has" in text for text in given)
    assert [text.rpartition(": ")[2].split()[-1] for text in given] == ["ray.", "machine.", "multiple."]


def test_other_combinations(complaints):
    only(complaints("--num-epoch", "1"), "exactly one of them")
    only(complaints("--set", "train={ global_batch_size = 32 }"), "exactly one of them")
    only(complaints("--max-async-level", "1", "--max-staleness", "0"), r"--max-staleness 1 or more")
    only(complaints("--update-weights-interval", "3", "--max-staleness", "1"), r"--max-staleness 2 or more")
    only(complaints("--transport", "direct"), r'sync\.transport = "direct": engine "fake" understands carrier')


def test_asynchrony(bound, complaints):
    only(
        complaints("--max-async-level", "2"),
        r'engine "fake" does not report which policy version .*--no-update-weights-in-flight',
    )
    only(complaints("--partial-rollout"), r"max_staleness is 0\. Pass --max-staleness with")
    only(complaints("--mask-offpolicy-in-partial-rollout"), r"--on-stale mask_old_spans")
    partial = ("--partial-rollout", "--max-staleness", "2")
    only(
        complaints(*partial, "--rollout.collector", "accepted"),
        r'collector "accepted" does not resume groups of earlier steps',
    )
    assert any("with max_async_level = 0 no rollout runs" in text for text in complaints("--update-weights-in-flight"))
    assert bound(*partial).collector.name == "pool"
    run = bound("--max-async-level", "3", "--no-update-weights-in-flight", "--update-weights-interval", "2")
    assert (run.collector.name, run.max_staleness) == ("accepted", 4)


def test_a_run_without_a_reward(complaints):
    problems = complaints(text=dotted().replace('reward = "one"\n', ""))
    only(problems, r'^reward: algorithm "grpo" needs one')


CORRECTION = """
from slime_core.contracts.correction import CorrectionDriver
from slime_core.plugin import driver

@driver("slime.corrections", "weigh")
class Weigh(CorrectionDriver):
    @classmethod
    def build(cls, config):
        return None
"""


def test_rollout_log_probs_as_old_ones_leave_no_gap_to_correct(bound, complaints, tmp_path):
    (tmp_path / "weigh.py").write_text(CORRECTION)
    # The run file's own plugin stays; the flag names the same file.
    plugins = ("--plugin", str(tmp_path / "weigh.py"), "--plugin", str(tmp_path / "fakes.py"))
    flags = (*plugins, "--corrections", "weigh")
    assert [file.path.name for file in bound(*flags).registry.plugin_files] == ["fakes.py", "weigh.py"]
    assert [part.name for part in bound(*flags).algo.corrections] == ["weigh"]
    only(complaints(*flags, "--use-rollout-logprobs"), r'correction "weigh" weighs the gap .* 0 by definition')


@pytest.mark.parametrize("name", ["tis", "icepop", "mis"])
def test_corrections_of_the_engines_gap_and_their_options(bound, complaints, name):
    run = bound("--corrections", name, *(("--tis-clip", "3") if name == "tis" else ()))
    (part,) = run.algo.corrections
    assert part.name == name
    assert name != "tis" or part.config.tis_clip == 3
    only(complaints("--corrections", name, "--use-rollout-logprobs"), f'correction "{name}" weighs the gap')
    assert bound("--set", f'algo.corrections=["{name}", "opsm"]', "--global-batch-size", "16").algo.corrections


def test_a_mask_by_how_far_the_policy_has_moved_needs_a_policy_that_has_moved(bound, complaints):
    """With one optimizer step per rollout batch it would do nothing, and no metric would show that."""
    only(
        complaints("--corrections", "opsm"),
        r'^algo\.corrections: "opsm" weighs how far .* --num-steps-per-rollout 2 or more',
    )
    assert bound("--corrections", "opsm", "--global-batch-size", "16").algo.corrections
    # The engine's log-probs as the old ones differ from the current ones in the first step too.
    run = bound("--corrections", "opsm", "--use-rollout-logprobs", "--opsm-delta", "1e-3")
    assert run.algo.corrections[0].config.opsm_delta == 1e-3


def test_a_kl_estimator_that_is_named_is_looked_up_although_its_term_is_off(bound, complaints):
    for flag, key in (("--kl-loss-type", "kl_loss_type"), ("--kl-reward-type", "kl_reward_type")):
        only(complaints(flag, "k33"), f'^algo\\.{key} = "k33": unknown KL estimator; close match: k3')
        only(complaints("--set", f"algo.{key}={{name='k2', strength=1}}"), "strength: unknown option")
        algo = bound(flag, "k2").algo
        assert (algo.kl_loss, algo.kl_reward) == (None, None)
    assert bound("--kl-loss-type", "k2", "--kl-loss-coef", "0.1").algo.kl_loss.name == "k2"


def test_problems_that_a_backend_finds_in_the_model_config(complaints, tmp_path, bound):
    config = tmp_path / "base" / "config.json"
    config.write_text(json.dumps({"vocab_size": 33}))
    only(complaints(), "only for a vocabulary of 32")
    # A folder that is not there is not compared with anything; loading it reports that.
    config.unlink()
    bound()


# --- Evaluation sets --------------------------------------------------------------------------------------------------


SETS = """
[eval]
eval_temperature = 0.4
eval_max_response_len = 40
pass_threshold = 0.5
[eval.defaults]
max_response_len = 30
reward = "two"
stop = ["d"]
[eval.datasets.own]
path = "own.jsonl"
temperature = 0.0
max_response_len = 20
n_samples_per_eval_prompt = 4
reward = "one"
stop = []
apply_chat_template = true
metadata_overrides = { kind = "x" }
[eval.datasets.plain]
path = "plain.jsonl"
"""


def test_precedence_of_evaluation_settings(bound):
    own, plain = bound(
        "--rollout-top-p", "1", "--rollout-temperature", "0.8", "--rollout-max-context-len", "99", extra=SETS
    ).evals
    assert (own.name, plain.name) == ("own", "plain")
    assert (own.temperature, plain.temperature) == (0.0, 0.4)  # set > eval_*
    assert (own.max_response_len, plain.max_response_len) == (20, 30)  # set > defaults > eval_*
    assert (own.num_samples, plain.num_samples) == (4, 1)
    assert (own.rewards[0].label, plain.rewards[0].label) == ("one", "two")
    assert (own.stop, plain.stop) == ((), ("d",))
    assert (own.apply_chat_template, plain.apply_chat_template) == (True, False)
    assert (own.input_key, own.label_key) == ("prompt", "label")  # the data table
    assert own.pass_threshold == 0.5
    assert own.metadata_overrides == {"kind": "x"}


def test_a_penalty_needs_an_engine_that_has_it(bound, complaints, monkeypatch):
    asked = {
        "extra": SETS.replace('stop = ["d"]', 'stop = ["d"]\nrepetition_penalty = 1.2') + "repetition_penalty = 1.0\n"
    }
    only(complaints(**asked), r'^eval\.datasets\.own: repetition_penalty = 1\.2: engine "fake" does not penalize')
    driver = bound().engine.driver
    monkeypatch.setattr(driver, "optional_capabilities", frozenset({Capability.REPETITION_PENALTY}), raising=False)
    own, plain = bound(**asked).evals
    assert (own.repetition_penalty, plain.repetition_penalty) == (1.2, 1.0)


def test_without_any_of_them_the_rollout_decides(bound):
    (only_set,) = bound("--rollout-temperature", "0.8", extra="[eval.datasets]\nt = 't.jsonl'\n").evals
    assert only_set.temperature == 0.8
    assert only_set.max_response_len == 16
    assert only_set.rewards[0].label == "one"


def test_sets_may_be_pairs_a_list_or_a_mapping(bound, complaints):
    pairs = bound("--eval-prompt-data", "a", "a.jsonl", "b", "b.jsonl")
    listed = bound("--set", "eval.datasets=[{ name = 'a', path = 'a.jsonl' }, { name = 'b', path = 'b.jsonl' }]")
    assert [s.name for s in pairs.evals] == [s.name for s in listed.evals] == ["a", "b"]
    only(complaints("--eval-prompt-data", "a"), r"NAME PATH pairs, got 1 words")
    only(complaints("--eval-prompt-data", "a", "a.jsonl", "a", "b.jsonl"), "the sets a are named twice")
    only(
        complaints("--set", "eval.datasets=[{ name = 'a', path = 'a' }, { name = 'a', path = 'b' }]"),
        "the sets a are named twice",
    )
    only(complaints("--set", "eval.datasets=[{ path = 'a' }]"), r"datasets\[0\] must be a table with a name")


def test_problems_of_sets_name_where_they_were_typed_and_come_once(complaints):
    problems = complaints(extra=SETS.replace('"two"', '"twoo"') + "[eval.datasets.other]\npath = 'o'\n")
    only(problems, r'^eval\.defaults\.reward\.name = "twoo": unknown')
    problems = complaints(extra=SETS.replace('reward = "one"', 'reward = "onee"'))
    only(problems, r'^eval\.datasets\.own\.reward\.name = "onee": unknown')
    problems = complaints(extra=SETS + "temprature = 1\n")
    only(problems, r"^eval\.datasets\.plain\.temprature: unknown option; close match: temperature")


# --- Round trip ---------------------------------------------------------------------------------------------------------


def test_the_resolved_config_is_a_run_file_of_the_same_run(bound, tmp_path):
    import tomlkit

    from slime_core.controller.startup import drop_none

    run = bound("--algo", "dapo", "--eps-clip", "0.1", "--warm-start", "w", "--kl-loss-coef", "0.1", extra=SETS)
    manifest = build_manifest(run, data_fingerprint="d")
    again = bound(text=tomlkit.dumps(drop_none(manifest.config)))
    assert again.algo.loss.config == run.algo.loss.config
    resolved = dict(build_manifest(again, data_fingerprint="d").config) | {"runs_dir": manifest.config["runs_dir"]}
    assert resolved == manifest.config
    assert build_manifest(again, data_fingerprint="d").fingerprint == manifest.fingerprint


# --- Launchers and optimizers -----------------------------------------------------------------------------------------


def test_a_launchers_options_are_flags_while_it_is_chosen(bound, complaints):
    words = ("--num-cpus-per-worker", "2", "--launcher.address", "auto")
    chosen = bound("--launcher", "ray", *words).launcher
    assert (chosen.name, chosen.config.num_cpus_per_worker, chosen.config.address) == ("ray", 2.0, "auto")
    only(complaints("--address", "auto"), r"^--address: unknown flag without the plugin .*: --launcher ray\.$")
    only(complaints(extra="launcher = { cpus = 1 }"), r"^launcher\.cpus: unknown option.* Options of slime-rl")


def test_another_launcher_drops_the_options_of_the_old_one_and_keeps_the_kernels(bound):
    file = 'launcher = { name = "ray", address = "auto", device = "cpu" }'
    assert bound(extra=file).launcher.config.address == "auto"
    run = bound("--launcher", "local", extra=file)
    assert (run.launcher.name, run.config.launcher.device) == ("local", "cpu")
    assert "address" not in build_manifest(run, data_fingerprint="d").config["launcher"]


def test_an_unknown_renderer_is_named_beside_what_there_is(complaints):
    only(
        complaints("--renderer", "chatt"),
        r'^data\.renderer\.name = "chatt": unknown prompt renderer; close match: chat\. Available: chat \(slime-sources',
    )
    only(complaints("--set", "data.renderer={name='chat', x=1}"), r"^data\.renderer\.x: unknown option")


def test_a_run_resumes_on_another_engine_with_resume(bound):
    """The engine, and how weights reach it: neither is another training. How often they do is."""
    words = ("--engine", "vllm", "--vllm-external-engine-addrs", "there:8000")
    here, there = (build_manifest(bound(*given), data_fingerprint="d") for given in ((), words))
    changes = changes_since(asdict(here), there)
    assert {change.kind for change in changes} == {ChangeKind.LAYOUT}
    assert "engine.name: 'fake' -> 'vllm'" in map(str, changes)
    less_often = build_manifest(bound(*words, "--update-weights-interval", "2"), data_fingerprint="d")
    assert {change.kind for change in changes_since(asdict(there), less_often)} == {ChangeKind.CONFIG}


def test_a_run_resumes_under_another_launcher_with_resume(bound):
    here, there = (build_manifest(bound(*words), data_fingerprint="d") for words in ((), ("--launcher", "ray")))
    assert {change.kind for change in changes_since(asdict(here), there)} == {ChangeKind.LAYOUT}
    assert [m.plugins[f"launcher {name}"].split()[0] for m, name in ((here, "local"), (there, "ray"))] == [
        "slime.launchers:slime-rl/local", "slime.launchers:slime-ray/ray",
    ]  # fmt: skip


def test_a_launcher_that_is_not_there(complaints):
    only(complaints("--launcher", "rays"), r'^launcher\.name = "rays": unknown launcher; close match: ray\.')


def test_a_missing_plugin_is_reported_with_its_distribution(monkeypatch, complaints):
    monkeypatch.setenv("SLIME_PLUGINS_DENY", "slime-ray,slime-training")
    problems = complaints("--launcher", "ray")
    assert any('launcher.name = "ray"' in text and "slime-ray" in text for text in problems)
    assert any('train.optimizer.name = "adam"' in text and "slime-training" in text for text in problems)
    assert install_hint("slime.launchers", "ray") == "ray comes with slime-ray: pip install slime-ray"
    assert install_hint("slime.optimizers", "adam") == "adam comes with slime-training: pip install slime-training"


OPTIMIZERS = """
from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.optimizer import OptimizerDriver
from slime_core.plugin import driver


class MuonConfig(DriverConfig):
    lion_momentum: float = 0.95
    \"\"\"Decay of the momentum.\"\"\"


@driver("slime.optimizers", "lion")
class Muon(OptimizerDriver):
    Config = MuonConfig

    @classmethod
    def build(cls, config):
        raise AssertionError("nothing is built while binding")
"""


def test_an_optimizer_is_a_name_with_options_beside_it(bound, complaints, tmp_path):
    (tmp_path / "lion.py").write_text(OPTIMIZERS)
    plugin = ("--plugin", str(tmp_path / "lion.py"))
    (role,) = bound(*plugin, "--optimizer", "lion", "--lion-momentum", "0.9", "--lr", "0.5").roles
    assert (role.optimizer.optimizer, role.optimizer.lr) == ("lion", 0.5)
    assert role.chosen_optimizer.options.lion_momentum == 0.9
    table = 'train.optimizer={ name = "lion", lion_momentum = 0.8 }'
    run = bound(*plugin, "--set", table)
    written = build_manifest(run, data_fingerprint="d").config["train"]["optimizer"]
    assert written == {"name": "lion", "lion_momentum": 0.8}
    only(
        complaints(*plugin, "--train.optimizer", "moun"), r'^train\.optimizer\.name = "moun": unknown optimizer; close'
    )
    only(complaints("--lion-momentum", "1"), r"^--lion-momentum: unknown flag")
    only(
        complaints(*plugin, "--set", table.replace("momentum", "momentun")),
        r"^train\.optimizer\.lion_momentun: unknown option; close match: lion_momentum",
    )


def test_an_optimizer_without_options_is_written_as_its_name(bound):
    for words, name in (((), "adam"), (("--optimizer", "sgd"), "sgd"), (("--train.optimizer.name", "sgd"), "sgd")):
        run = bound(*words)
        assert build_manifest(run, data_fingerprint="d").config["train"]["optimizer"] == name
        assert run.roles[0].optimizer.optimizer == name
        assert bound("--optimizer", f"slime-training/{name}").roles[0].optimizer.optimizer == name


def test_a_backend_may_refuse_an_optimizer(complaints, monkeypatch):
    from slime_core.contracts.backend import BackendDriver

    def refuse(cls, config, name, optimizer):
        return [f"{name} of {optimizer.__name__}: no."]

    monkeypatch.setattr(BackendDriver, "optimizer_problems", classmethod(refuse))
    assert complaints("--optimizer", "sgd") == ["sgd of SgdDriver: no."]


# --- Numbers ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("train.num_rollout", "true"),
        ("train.lr", "true"),
        ("rollout.rollout_stop_token_ids", "[1, true]"),
        ("rollout.reward_timeout", "false"),
        ("backend.tensor_model_parallel_size", "true"),
        ("engine.mem_fraction_static", "true"),
        ("algo.eps_clip", "true"),
    ],
)
def test_true_and_false_are_no_numbers(complaints, key, text):
    only(
        complaints("--set", f"{key}={text}"),
        rf"^{re.escape(key)} = .*: requires a number or text, not true or false\.$",
    )


def test_true_where_it_is_a_value(bound):
    run = bound(
        "--set", "backend.recompute=true",
        "--set", "data.apply_chat_template_kwargs={ enable_thinking = false }",
        "--set", "eval.datasets.a={ path = 'a.jsonl', metadata_overrides = { hard = true } }",
    )  # fmt: skip
    assert run.backend.config.recompute is True
    assert run.config.data.apply_chat_template_kwargs == {"enable_thinking": False}
    assert run.config.eval.datasets["a"].metadata_overrides == {"hard": True}


@pytest.mark.parametrize("text", ["9223372036854775808", "-9223372036854775809", "1" + "0" * 30])
def test_integers_have_64_bits(complaints, text):
    for words in (("--seed", text), ("--set", f"rollout.rollout_stop_token_ids=[{text}]")):
        only(complaints(*words), r"(seed|rollout_stop_token_ids) = .*: (is beyond the integers of 64 bits|.*integer)")


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (("--rollout-batch-size", "1000000000000"), "rollout: rollout_batch_size 1000000000000 x n_samples_per_prompt"),
        (("--n-samples-per-prompt", "1000000000000"), "x n_samples_per_prompt 1000000000000 = "),
        (("--over-sampling-batch-size", "1000000000000"), "rollout: over_sampling_batch_size 1000000000000 x "),
        (("--max-async-level", "1000000000000"), "x (max_async_level 1000000000000 + 1) = "),
        (("--reward-workers", "1000000000"), "rollout.reward_workers = 1,000,000,000 processes: "),
        (("--rollout-num-gpus", "1000000000"), "launcher.rollout_num_gpus = 1,000,000,000 engines: "),
        (
            ("--actor-num-gpus-per-node", "1000000000", "--launcher", "ray"),
            "actor: ranks = 1,000,000,000 trainer ranks: ",
        ),
        (
            ("--eval-prompt-data", "a", "a.jsonl", "--n-samples-per-eval-prompt", "1000000000000"),
            "eval a: responses to a prompt = 1,000,000,000,000 samples: ",
        ),
    ],
)
def test_sizes_that_no_machine_holds(complaints, words, expected):
    problems = complaints(*words)
    assert expected in problems[0], problems
    assert re.search(
        r"needs at least [\d,]+ GiB for them, and this machine has \d+\. Pass a smaller number\.$", problems[0]
    )


def test_the_divisors_of_a_large_batch_are_found_at_once(complaints):
    size = 49_999_999
    only(
        complaints("--rollout-batch-size", "50000000", "--n-samples-per-prompt", "2", "--global-batch-size", str(size)),
        r"Nearest that fit: 25000000 and 50000000\.$|at least .* GiB",
    )


def test_a_run_file_may_begin_with_a_byte_order_mark(tmp_path):
    (tmp_path / "run.toml").write_text('name = "x"', encoding="utf-8-sig")
    assert read_run_file(tmp_path / "run.toml") == {"name": "x"}


def test_a_run_file_nested_too_deep(tmp_path):
    (tmp_path / "run.toml").write_text("x = " + "[" * 5000)
    with pytest.raises(ConfigError, match=r"run.toml: not valid TOML: arrays or tables are nested too deep"):
        read_run_file(tmp_path / "run.toml")
