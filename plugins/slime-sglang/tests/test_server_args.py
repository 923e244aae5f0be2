"""Options of the installed ServerArgs, read from its source, and how a run file sets them."""

import ast
import subprocess
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType, SimpleNamespace

import pytest
from pydantic import ValidationError

from slime_core.config.chosen import chosen_flags
from slime_core.config.flags import FlagTable, kernel_flags
from slime_core.contracts.setup import EngineLayout
from slime_core.errors import ConfigError, EngineError
from slime_core.registry import Registry
from slime_preflight.schema import run_schema
from slime_serving.external import read_token
from slime_sglang import launching
from slime_sglang.config import SglangOptions, make_config, options_of_role, role_of, server_options
from slime_sglang.option_choices import NamedLists
from slime_sglang.plugin import Sglang
from slime_sglang.router import chosen_options
from slime_sglang.router_args import router_options
from slime_sglang.server_args import ServerOption, arguments_in, installed_options, options_in, with_arguments
from slime_transports.plugin import Delta, Disk, Distributed, Ipc

OLD = """
@dataclasses.dataclass
class ServerArgs:
    model_path: str
    tp_size: int = 1
    mem_fraction_static: Optional[float] = None
    disable_radix_cache: bool = False
    cuda_graph_bs: Optional[List[int]] = None
    _hidden: int = 0

    @staticmethod
    def add_cli_args(parser):
        parser.add_argument("--tensor-parallel-size", "--tp-size", type=int)
        parser.add_argument("--mem-fraction-static", choices=[1, 2])

@dataclasses.dataclass
class PortArgs:
    nccl_port: int
"""
NEW = """
class Memory(msgspec.Struct):
    _NS_PATH = "memory"
    derived = Derived(fn="x")
    mem_fraction_static: A[Optional[float], "Share of "
        "the memory."] = None
    load_format: A[str, Arg(help="The format.", choices=CHOICES + ["own"])] = "auto"
    dp_size: A[int, Arg(help="Size.", aliases=["--data-parallel-size"])] = 1
    policy: Optional[Literal["lpm", "fcfs"]] = None
    level: A[Literal[None, 1, 2], "Level."] = 1
    parser: A[str, Arg(help="Parser.", choices=PARSERS.keys())] = None
"""
LISTS = """
CHOICES = ["auto", "dummy"]
add_load_format_choices = CHOICES.extend
"""


def test_both_forms_of_the_record_are_read():
    named = NamedLists.of([ast.parse(LISTS)], extended=False)
    old = {option.name: option for option in options_in(ast.parse(OLD), named, record="ServerArgs")}
    assert {name: option.type for name, option in old.items()} == {
        "model_path": str,
        "tp_size": int,
        "mem_fraction_static": float,
        "disable_radix_cache": bool,
        "cuda_graph_bs": list[int],
    }
    assert list(with_arguments(old, arguments_in(ast.parse(OLD), named)))[1:3] == [
        ServerOption("tp_size", int, "See SGLang's documentation.", aliases=("tensor_parallel_size",)),
        ServerOption("mem_fraction_static", float, "See SGLang's documentation.", choices=(1, 2)),
    ]
    new = list(options_in(ast.parse(NEW), named))
    assert new == [
        ServerOption("mem_fraction_static", float, "Share of the memory."),
        ServerOption("load_format", str, "The format.", ("auto", "dummy", "own")),
        ServerOption("dp_size", int, "Size.", aliases=("data_parallel_size",)),
        ServerOption("policy", str, "See SGLang's documentation.", ("lpm", "fcfs")),
        ServerOption("level", int, "Level.", (1, 2)),
        ServerOption("parser", str, "Parser."),
    ]


def test_a_list_that_plugins_may_extend_is_open():
    named = NamedLists.of([ast.parse(LISTS)], extended=True)
    choices = {option.name: option.choices for option in options_in(ast.parse(NEW), named)}
    assert choices["load_format"] == ()
    assert choices["policy"] == ("lpm", "fcfs")


@pytest.mark.sglang
def test_choices_of_the_installed_sglang():
    """Against its own parser's usage would take its imports; these are in its documentation, in every version."""
    options = {option.name: option for option in installed_options()}
    assert {"lpm", "fcfs", "random"} <= set(options["schedule_policy"].choices)
    assert {"triton", "torch_native", "fa3"} <= set(options["attention_backend"].choices)
    assert "data_parallel_size" in options["dp_size"].aliases
    # Its parsers are known when it runs.
    assert options["reasoning_parser"].choices == ()
    assert sum(bool(option.choices) for option in options.values()) > 50
    for name, value in launching.ON_CPU.items():
        assert not options[name].choices or value in options[name].choices


def test_driver_module_is_light():
    code = (
        "import sys, slime_sglang.plugin\n"
        "heavy = {'torch', 'transformers', 'ray', 'numpy', 'sglang', 'aiohttp'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_config(monkeypatch):
    options = (
        ServerOption("mem_fraction_static", float, "Doc."),
        ServerOption("model_path", str, "Doc.", aliases=("model",)),
        ServerOption("schedule_policy", str, "Doc.", ("lpm", "fcfs")),
        ServerOption("modules", list[str], "Doc.", ("a", "b")),
        ServerOption("dp_size", int, "Doc.", aliases=("data_parallel_size",)),
    )
    monkeypatch.setattr("slime_sglang.config.options_of_server", lambda: options)
    config = make_config()
    assert server_options(config(mem_fraction_static="0.5")) == {"mem_fraction_static": 0.5}
    assert server_options(config()) == {}
    with pytest.raises(ValidationError, match=r"decided by model\.hf_checkpoint"):
        config(model_path="/elsewhere")
    with pytest.raises(ValidationError, match=r"decided by model\.hf_checkpoint"):
        config(model="/elsewhere")
    with pytest.raises(ValidationError, match="called dp_size here: pass --sglang-dp-size"):
        config(data_parallel_size=2)
    with pytest.raises(ValidationError, match=r"close match: lpm\. Choices: lpm, fcfs"):
        config(schedule_policy="lpn")
    with pytest.raises(ValidationError, match="not among the choices"):
        config(modules=["a", "c"])
    given = config(schedule_policy="fcfs", modules=["a"], dp_size=1)
    assert server_options(given) == {"schedule_policy": "fcfs", "modules": ["a"], "dp_size": 1}
    with pytest.raises(ValidationError):
        config(mem_fraction_statik=0.5)
    with pytest.raises(ValidationError):
        config(mem_fraction_static="much")
    assert config.model_validate_json(config(servers=2).model_dump_json()) == config(servers=2)
    assert all(field.description for field in config.model_fields.values())


def test_a_token_file(tmp_path):
    path = tmp_path / "token"
    path.write_text(" one-token\n")
    assert read_token(str(path)) == "one-token"
    path.write_text("two tokens")
    with pytest.raises(EngineError, match="must contain one token"):
        read_token(str(path))
    with pytest.raises(EngineError, match="cannot be read"):
        read_token(str(tmp_path / "missing"))


class WithOptions(SglangOptions):
    """As with an SGLang that has these."""

    chunked_prefill_size: int | None = None
    dp_size: int | None = None
    pp_size: int | None = None


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"external_engine_addrs": ("a:1", "b:2", "c:3"), "servers": 2}, "not a multiple"),
        (
            {"external_engine_addrs": ("a:1",), "deterministic": True},
            "it was decided when the external servers were started",
        ),
        ({"router_options": {"cache_threshold": 0.5}}, "there is no router"),
        ({"prefill_servers": 1, "router_policy": "random"}, "Set engine.servers = 2 or more"),
        ({"prefill_servers": 1, "servers": 2}, "requires a router that pairs the servers"),
        ({"decode_options": {"dp_size": 2}}, "engine.decode_options: every server prefills and decodes"),
        (
            {"prefill_servers": 1, "servers": 2, "router_policy": "random", "decode_options": {"dp_size": 2}},
            "engine.decode_options.dp_size = 2: SGLang loads new weights into one replica only",
        ),
        (
            {"prefill_servers": 1, "servers": 2, "router_policy": "random", "prefill_options": {"pp_size": 2}},
            "engine.prefill_options.pp_size = 2: it must be the same for all servers of an engine. Set engine.pp_size",
        ),
        ({"prefill_servers": 1, "servers": 2, "router_policy": "random", "pause_mode": "retract"}, "is on two servers"),
    ],
)
def test_options_that_exclude_each_other(options, words, monkeypatch):
    known = {"cache_threshold": ServerOption("cache_threshold", float, "Doc.")}
    monkeypatch.setattr("slime_sglang.router_args.router_options", lambda: known)
    monkeypatch.setattr("slime_sglang.config.options_of_server", lambda: (ServerOption("model_path", str, "Doc."),))
    monkeypatch.setitem(sys.modules, "mooncake", module_of("mooncake"))
    (problem,) = Sglang.problems(WithOptions(**options))
    assert words in problem


def test_options_of_some_servers_are_checked():
    given = WithOptions(prefill_options={"chunked_prefill_size": "64"}, decode_options={"dp_size": 1})
    assert given.prefill_options == {"chunked_prefill_size": 64}
    assert (role_of(given, 0), options_of_role(given, "decode")) == (None, {"dp_size": 1})
    paired = WithOptions(prefill_servers=2, servers=3, prefill_options={"chunked_prefill_size": 64})
    assert [role_of(paired, place) for place in range(3)] == ["prefill", "prefill", "decode"]
    assert options_of_role(paired, "prefill") == {"chunked_prefill_size": 64}
    for wrong, words in (
        ({"chunked_prefil_size": 64}, r"prefill_options\n.*chunked_prefil_size: Extra inputs are not permitted"),
        ({"chunked_prefill_size": "many"}, r"chunked_prefill_size: Input should be a valid integer"),
        ({"servers": 2}, r"servers is an option of the whole engine: set engine\.servers"),
    ):
        with pytest.raises(ValidationError, match=words):
            WithOptions(prefill_options=wrong)


def module_of(name):
    """A module that looks installed."""
    module = ModuleType(name)
    module.__spec__ = ModuleSpec(name, None)
    return module


def test_the_package_that_hands_keys_and_values_over(monkeypatch):
    class Options(SglangOptions):
        disaggregation_transfer_backend: str | None = None

    def problems(**more):
        return Sglang.problems(Options(prefill_servers=1, servers=2, router_policy="random", **more))

    monkeypatch.setattr("slime_sglang.config.options_of_server", lambda: (ServerOption("model_path", str, "Doc."),))
    monkeypatch.setattr("slime_sglang.router_args.router_options", lambda: {"policy": None})
    for package in ("mooncake", "nixl"):
        monkeypatch.setitem(sys.modules, package, module_of(package))
    assert problems() == problems(disaggregation_transfer_backend="nixl") == []
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (problem,) = problems()
    assert '"mooncake", which is not installed here: `pip install mooncake-transfer-engine`' in problem
    (problem,) = problems(disaggregation_transfer_backend="nixl")
    assert "`pip install nixl`" in problem
    assert problems(disaggregation_transfer_backend="fake") == []


@pytest.mark.sglang
def test_options_of_the_router_are_the_installed_ones():
    given = {
        "balance_abs_threshold": "5",
        "cache_threshold": 0.5,
        "disable_retries": False,
        # Lists and tables, as TOML has them.
        "prometheus_duration_buckets": [0.1, 1.0],
        "cors_allowed_origins": ["http://here"],
        "selector": {"app": "x"},
    }
    assert SglangOptions(router_options=given).router_options == given | {"balance_abs_threshold": 5}
    wrong = {"balance_abs_treshold": 5, "policy": "random", "port": 30000, "retry_max_retries": "many"}
    with pytest.raises(ValidationError) as message:
        SglangOptions(router_options=wrong)
    for words in (
        "balance_abs_treshold: the installed sglang-router has no such option; close match: balance_abs_threshold",
        "policy: not an option of a run: decided by engine.router_policy",
        "port: not an option of a run: decided by the engine: a free one",
        "retry_max_retries = 'many': input should be a valid integer",
    ):
        assert words in str(message.value)


@pytest.mark.sglang
def test_options_of_the_router_are_flags():
    table = FlagTable.of([*kernel_flags(), *chosen_flags({"engine": {"name": "sglang"}}, Registry.from_environment())])
    words = ["--router-policy", "random", "--router-balance-abs-threshold", "5", "--router-disable-circuit-breaker"]
    assert table.parse(words) == [
        (("engine", "router_policy"), "random"),
        (("engine", "router_options", "balance_abs_threshold"), "5"),
        (("engine", "router_options", "disable_circuit_breaker"), True),
    ]
    with pytest.raises(ConfigError, match=r"--router-port: unknown flag"):
        table.parse(["--router-port", "1"])
    schema = run_schema({"engine": "sglang"})["$defs"]["engine_sglang"]["properties"]
    assert "router_options" in schema
    assert "balance_abs_threshold" not in schema


@pytest.mark.sglang
def test_options_of_the_router_at_its_start():
    options = chosen_options(SglangOptions(request_timeout=60.0, router_options={"balance_abs_threshold": 5}))
    assert options.pop("balance_abs_threshold") == 5
    assert options == {"request_timeout_secs": 60, "disable_retries": True, "balance_rel_threshold": 1.2}
    # The names of the installed sglang-router.
    assert set(options) <= set(router_options())


def test_a_missing_router_is_a_problem(monkeypatch):
    monkeypatch.setattr("slime_sglang.router_args.router_options", dict)
    options = (ServerOption("model_path", str, "Doc."),)
    monkeypatch.setattr("slime_sglang.config.options_of_server", lambda: options)
    (problem,) = Sglang.problems(SglangOptions(router_policy="random", router_options={"anything": 1}))
    assert 'engine.router_policy = "random": sglang-router is not installed here' in problem


@pytest.mark.parametrize(
    ("options", "layout", "words"),
    [
        ({"servers": 2}, {"num_devices": 1}, "Pass --here 2 or a multiple"),
        ({"servers": 2}, {"num_devices": 4, "num_nodes": 2}, "on 2 machines"),
        (
            {"router_policy": "random"},
            {"num_devices": 1, "routed_experts": True},
            "does not forward the request for expert ids",
        ),
        ({"servers": 2}, {"num_devices": 4}, None),
        ({"servers": 2, "external_engine_addrs": ("a:1", "b:2")}, {"num_devices": 1}, None),
        (
            {"external_engine_addrs": ("a:1",)},
            {"num_devices": 1, "num_engines": 2},
            "names 1 servers, but 2 engines of 1 need 2",
        ),
        ({"router_policy": "random"}, {"num_devices": 1}, None),
        ({"pause_mode": "retract"}, {"num_devices": 1, "offload": True}, "Set abort, or pass --no-offload-rollout"),
        ({"pause_mode": "retract"}, {"num_devices": 1}, None),
        ({}, {"num_devices": 1, "offload": True}, None),
    ],
)
def test_options_that_do_not_fit_the_run(options, layout, words):
    problems = Sglang.layout_problems(SglangOptions(**options), EngineLayout(devices_flag="--here", **layout))
    assert len(problems) == (words is not None)
    assert all(words in problem for problem in problems)


@pytest.mark.parametrize(
    ("options", "layout", "words"),
    [
        ({"quantization": "fp8"}, {"num_devices": 1}, 'engine.quantization = "fp8"'),
        ({"external_engine_addrs": ("a:1",)}, {"num_devices": 1}, "slime did not start"),
        ({}, {"num_devices": 1}, None),
        ({}, {"num_devices": 2}, None),
        ({"quantization": "fp8"}, {"num_devices": 1, "num_engines": 2}, None),
    ],
)
def test_servers_that_could_be_compared_with_nothing(options, layout, words):
    layout = EngineLayout(devices_flag="--here", **layout)
    # Options of SGLang's own are fields only where it is installed.
    engine = SimpleNamespace(**{"external_engine_addrs": (), "servers": 1} | options)
    problems = Ipc.layout_problems(Ipc.Config(check_weight_update_equal=True), engine, layout)
    assert len(problems) == (words is not None)
    assert all(words in problem and "--rollout-num-gpus" in problem for problem in problems)
    assert Ipc.layout_problems(Ipc.Config(), engine, layout) == []


def test_a_missing_sglang_is_a_problem(monkeypatch):
    monkeypatch.setattr("slime_sglang.config.options_of_server", tuple)
    (problem,) = Sglang.problems(SglangOptions())
    assert "not installed" in problem
    assert Sglang.problems(SglangOptions(external_engine_addrs=("host:1",))) == []


@pytest.mark.parametrize("driver", [Disk, Delta])
def test_weights_of_pipeline_stages_are_not_compared(driver):
    """Two servers whose first stages hold the same could differ in the others."""
    engine = SimpleNamespace(pp_size=2)
    assert driver.problems(driver.Config(check_weight_update_equal=True), engine) == [
        "sync.check_weight_update_equal = true, engine.pp_size = 2: only the first pipeline stage of a server responds, so the "
        "weights of the others would not be compared. Omit it, or set pp_size = 1."
    ]
    assert driver.problems(driver.Config(), engine) == []


@pytest.mark.parametrize("driver", [Ipc, Distributed])
def test_stages_that_cannot_be_distinguished(driver):
    """SGLang numbers a server's processes by their tensor-parallel rank."""
    engine = SimpleNamespace(pp_size=2)
    (problem,) = driver.problems(driver.Config(), engine)
    assert "engine.pp_size = 2" in problem
    assert "pp_size = 1" in problem
    assert driver.problems(driver.Config(), SglangOptions()) == Disk.problems(Disk.Config(), engine) == []


@pytest.mark.parametrize("driver", [Disk, Delta])
def test_a_separate_draft_is_not_overwritten_from_a_folder(driver):
    engine = SimpleNamespace(speculative_draft_model_path="/models/draft")
    (problem,) = driver.problems(driver.Config(), engine)
    assert 'engine.speculative_draft_model_path = "/models/draft"' in problem
    assert '"ipc"' in problem
    assert Ipc.problems(Ipc.Config(), engine) == driver.problems(driver.Config(), SglangOptions()) == []
