"""Flags: which key a flag sets, and the errors of those that set none."""

import re
from pathlib import Path

import pytest
from pydantic import BaseModel, Field
from pydantic.fields import FieldInfo

from slime_core.config.chosen import chosen_flags
from slime_core.config.flags import FlagTable, kernel_flags, option_flags
from slime_core.config.load import merge
from slime_core.contracts.driver import TableOptions
from slime_core.contracts.paths import FlagText
from slime_core.errors import ConfigError
from slime_core.registry import Registry

KERNEL = FlagTable.of(kernel_flags())


def parse(*words, table=KERNEL, **how):
    return table.parse(words, **how)


def problems(*words, table=KERNEL):
    with pytest.raises(ConfigError) as caught:
        parse(*words, table=table)
    return caught.value.problems


def test_the_kernels_flags_match_the_recorded_list():
    """A new flag is a visible decision: add it to kernel_flags.txt."""
    known = (Path(__file__).parent / "kernel_flags.txt").read_text().split()
    found = sorted(f"--{flag.name}" for flag in kernel_flags())
    assert found == known


def test_every_kernel_flag_is_documented_and_unambiguous():
    silent = [flag.name for flag in kernel_flags() if not flag.field.description and flag.path[-1] != "name"]
    assert not silent
    assert not KERNEL.ambiguous


@pytest.mark.parametrize(
    ("words", "path", "value"),
    [
        (["--lr", "1e-4"], ("train", "lr"), "1e-4"),
        (["--lr=1e-4"], ("train", "lr"), "1e-4"),
        (["--train.lr", "1e-4"], ("train", "lr"), "1e-4"),
        (["--rollout_batch_size", "8"], ("rollout", "rollout_batch_size"), "8"),
        (["--rollout-top-k", "-1"], ("rollout", "rollout_top_k"), "-1"),
        (["--seed", "3"], ("seed",), "3"),
        (["--algo", "grpo"], ("algo", "name"), "grpo"),
        (["--algo.name", "grpo"], ("algo", "name"), "grpo"),
        (["--reward", "math"], ("reward", "name"), "math"),
        (["--eval.defaults.reward", "math"], ("eval", "defaults", "reward", "name"), "math"),
        (["--launcher", "ray"], ("launcher", "name"), "ray"),
        (["--advantage", "group_norm"], ("algo", "advantage"), "group_norm"),
        (["--algo.advantage", "group_norm"], ("algo", "advantage"), "group_norm"),
        (["--transport", "direct"], ("sync", "transport"), "direct"),
        (["--async-buffer-size", "2"], ("rollout", "max_async_level"), "2"),
        (["--balance-data"], ("train", "balance_data"), True),
        (["--no-balance-data"], ("train", "balance_data"), False),
        (["--no-train.balance-data"], ("train", "balance_data"), False),
        (["--balance-data", "false"], ("train", "balance_data"), "false"),
        (["--eval.defaults.top-p", "0.5"], ("eval", "defaults", "top_p"), "0.5"),
        (["--max-staleness", "none"], ("rollout", "max_staleness"), None),
        (["--filters", "a", "b,c"], ("rollout", "filters"), ["a", "b", "c"]),
        (["--filters", '["a,b"]'], ("rollout", "filters"), ["a,b"]),
        (["--eval-prompt-data", "x", "x.jsonl@[0:2]"], ("eval", "eval_prompt_data"), ["x", "x.jsonl@[0:2]"]),
        (["--set", "train.lr=1e-4"], ("train", "lr"), 1e-4),
        (["--set=rollout.filters=[{ name = 'a' }]"], ("rollout", "filters"), [{"name": "a"}]),
        (["--set", "name=some words"], ("name",), "some words"),
        (["--set", "algo.use_kl_loss=true"], ("algo", "use_kl_loss"), True),
        (["--set", "reward.url=http://x/?a=b"], ("reward", "url"), "http://x/?a=b"),
    ],
)
def test_a_flag_sets_a_key(words, path, value):
    assert parse(*words) == [(path, value)]


def test_text_from_flags_is_marked_also_inside_lists():
    (_, plain), (_, listed), (_, nested) = parse(
        "--ref-load", "here", "--plugin", "a.py", "b.py", "--set", "data.prompt_data=[{ path = 'x' }]"
    )
    assert isinstance(plain, FlagText)
    assert all(isinstance(word, FlagText) for word in listed)
    assert isinstance(nested[0]["path"], FlagText)


def test_flags_follow_each_other():
    assert parse("--balance-data", "--lr", "1", "--filters", "a", "--seed", "2", "--lr", "3") == [
        (("train", "balance_data"), True),
        (("train", "lr"), "1"),
        (("rollout", "filters"), ["a"]),
        (("seed",), "2"),
        (("train", "lr"), "3"),
    ]


@pytest.mark.parametrize(
    ("words", "value"),
    [
        (["--filters", "a", "--seed", "1", "--filters", "b", "c"], ["a", "b", "c"]),
        (["--filters", '["a,b"]', "--rollout.filters=c"], ["a,b", "c"]),
        (["--filters", "{ name = 'a' }", "--filters", '[{ name = "b" }, "c"]'], [{"name": "a"}, {"name": "b"}, "c"]),
        (["--set", "rollout.filters=['a']", "--filters", "b"], ["a", "b"]),
        (["--filters", "a", "--set", "rollout.filters=['b']"], ["b"]),
    ],
)
def test_a_list_flag_that_is_passed_twice_appends(words, value):
    assert merge({"rollout": {"filters": ["of", "the", "file"]}}, parse(*words))["rollout"]["filters"] == value


def test_a_plugins_list_continues_too():
    class Lists(BaseModel):
        kept: tuple[int, ...] = ()

    table = FlagTable.of(option_flags(Lists, ("reward",), "acme 1.0"))
    assert parse("--kept", "1", "--kept", "2,3", table=table) == [(("reward", "kept"), ["1", "2", "3"])]


def test_plugins_add_to_those_of_the_run_file():
    words = ("--plugin", "a.py", "--plugin", "b.py")
    assert merge({"plugin": ["own.py"]}, parse(*words)) == {"plugin": ["own.py", "a.py", "b.py"]}
    assert merge({}, parse(*words)) == {"plugin": ["a.py", "b.py"]}
    assert merge({"plugin": ["own.py"]}, parse("--set", "plugin=['a.py']")) == {"plugin": ["a.py"]}


def test_all_unknown_words_are_reported_at_once():
    found = problems("--rolout-batch-size", "3", "stray", "--lr", "--seed", "1", "--set", "lr", "--no-lr")
    assert [re.match(r'"?(--)?[\w-]+', line).group() for line in found] == [
        "--rolout-batch-size",
        "--lr",
        "--set",
        "--no-lr",
    ]
    assert "close match: --rollout-batch-size" in found[0]
    assert "requires a value" in found[1]
    assert "KEY=VALUE" in found[2]


def test_a_stray_word_is_reported():
    assert problems("stray") == ['"stray": unexpected word; flags start with --.']
    assert problems("--seed", "1", "2") == ['"2": unexpected word; flags start with --.']


def test_a_negated_switch_takes_no_value():
    assert problems("--no-balance-data", "true") == [
        "--no-balance-data takes no value; pass --train.balance_data true."
    ]
    assert problems("--no-balance-data=false")


def test_lenient_parsing_keeps_known_flags():
    words = ["--unknown", "3", "4", "--lr", "1", "--also-unknown"]
    assert parse(*words, lenient=True) == [(("train", "lr"), "1")]


class Options(BaseModel):
    lr: float = 1.0
    depth: int = 2
    deep_switch: bool = Field(False)


def test_plugin_options_a_kernel_key_wins_and_two_plugins_are_ambiguous():
    table = FlagTable.of(
        [
            *kernel_flags(),
            *option_flags(Options, ("backend",), "acme 1.0"),
            *option_flags(Options, ("engine",), "other 1.0"),
            *option_flags(Options, ("engine",), "other 1.0", prefix="fast-"),
        ]
    )
    assert parse("--lr", "1", "--backend.lr", "2", table=table) == [(("train", "lr"), "1"), (("backend", "lr"), "2")]
    assert problems("--depth", "1", table=table) == [
        "--depth: several keys have this name; pass --backend.depth or --engine.depth."
    ]
    assert parse("--fast-depth", "1", "--no-fast-deep-switch", table=table) == [
        (("engine", "depth"), "1"),
        (("engine", "deep_switch"), False),
    ]


# --- Merging ----------------------------------------------------------------------------------------------------------


def test_a_table_that_is_a_plain_name_grows():
    assert merge({"algo": "grpo"}, [(("algo", "eps_clip"), 0.3)]) == {"algo": {"name": "grpo", "eps_clip": 0.3}}
    assert merge({}, [(("algo", "eps_clip"), 0.3)]) == {"algo": {"eps_clip": 0.3}}


def test_another_name_drops_the_options_of_the_old_one():
    tables = {"algo": {"name": "grpo", "eps_clip": 0.3}}
    assert merge(tables, [(("algo", "name"), "gspo")]) == {"algo": {"name": "gspo"}}
    assert merge(tables, [(("algo", "name"), "grpo")]) == tables
    assert tables == {"algo": {"name": "grpo", "eps_clip": 0.3}}


def test_a_new_name_and_its_options_may_come_in_any_order():
    tables = {"algo": {"name": "grpo", "eps_clip": 0.3}}
    expected = {"algo": {"name": "gspo", "eps_clip": 0.1}}
    eps, name = (("algo", "eps_clip"), 0.1), (("algo", "name"), "gspo")
    assert merge(tables, [name, eps]) == expected
    assert merge(tables, [eps, name]) == expected


def test_later_values_win():
    assert merge({"seed": 1}, [(("seed",), 2), (("seed",), 3)]) == {"seed": 3}


@pytest.mark.parametrize("there", [["jsonl"], 5, 1.5, True])
def test_a_key_inside_something_that_is_no_table(there):
    with pytest.raises(ConfigError, match=r"trackers\.name\.x: trackers is not a table; set trackers as a whole"):
        merge({"trackers": there}, [(("trackers", "name", "x"), 1)])


class Served(BaseModel):
    addresses: list[str] = Field(default=[])


def test_keys_inside_a_plugins_table_have_flags():
    fields = {"max_queue": FieldInfo(annotation=int | None, default=None), "fast": FieldInfo(annotation=bool | None)}
    tables = [TableOptions(option="router_options", prefix="router-", fields=fields)]
    table = FlagTable.of([*kernel_flags(), *option_flags(Served, ("engine",), "acme", prefix="acme-", tables=tables)])
    assert parse("--router-max-queue", "5", "--router-fast", "--no-router-fast", table=table) == [
        (("engine", "router_options", "max_queue"), "5"),
        (("engine", "router_options", "fast"), True),
        (("engine", "router_options", "fast"), False),
    ]
    with pytest.raises(ConfigError, match="--router-max-queu: unknown flag; close match: --router-max-queue"):
        parse("--router-max-queu", "5", table=table)


def test_a_plugins_option_by_another_name():
    """It is not listed, and the kernel's own flags take precedence."""
    aliases = {"their-addresses": "addresses", "seed": "addresses"}
    flags = list(option_flags(Served, ("engine",), "acme", prefix="acme-", aliases=aliases))
    table = FlagTable.of([*kernel_flags(), *flags])
    assert parse("--their-addresses", "a,b", table=table) == [(("engine", "addresses"), ["a", "b"])]
    assert parse("--acme-addresses", "a", "--seed", "3", table=table)[1] == (("seed",), "3")
    assert [flag.name for flag in flags] == ["acme-addresses"]


def test_help_cuts_no_flag_short(capsys, monkeypatch, tmp_path):
    from slime_core.cli.help import print_run_help

    monkeypatch.setenv("COLUMNS", "80")
    (tmp_path / "run.toml").write_text('name = "x"\nengine = "sglang"\nbackend = "megatron"\n')
    print_run_help([str(tmp_path / "run.toml")])
    given = capsys.readouterr().out
    chosen = chosen_flags({"engine": "sglang", "backend": "megatron"}, Registry.from_environment())
    names = [f"--{flag.name}" for flag in [*kernel_flags(), *chosen]]
    assert len(max(names, key=len)) > 40
    assert [name for name in names if name not in given] == []


def test_tables_in_a_list_are_not_cut_at_their_commas():
    tables = ['{ name = "wandb", project = "a,b" }', "jsonl,csv", '{ name = "x" }']
    parsed = [{"name": "wandb", "project": "a,b"}, "jsonl", "csv", {"name": "x"}]
    assert parse("--trackers", *tables) == [(("trackers",), parsed)]
    assert parse("--trackers", tables[0], "--trackers", *tables[1:]) == [(("trackers",), parsed)]
    assert parse("--trackers", '[{ name = "a", b = 1 }, "c"]', "d")[0][1] == [{"name": "a", "b": 1}, "c", "d"]
    for words in (['{name="wandb",', 'project="a"}'], ['{"name": "wandb"}', "jsonl"], ['{"name": "wandb"}']):
        (problem,) = problems("--trackers", *words)
        assert problem.startswith(
            f"--trackers {words[0]}: begins like a TOML table or list and is none. Put it into quotes"
        )
    # Where the items are texts, they may begin like one.
    assert parse("--rollout-stop", "[END]", "{") == [(("rollout", "rollout_stop"), ["[END]", "{"])]
