"""Options of the installed ServerArgs, read from its source, and how a run file says them."""

import ast
import subprocess
import sys

import pytest
from pydantic import ValidationError

from slime_core.errors import EngineError
from slime_sglang.external import read_token
from slime_sglang.plugin import Sglang, SglangOptions, make_config, server_options
from slime_sglang.server_args import ServerOption, options_in
from slime_sglang.transports.plugin import Disk, Distributed, Ipc

OLD = """
@dataclasses.dataclass
class ServerArgs:
    model_path: str
    tp_size: int = 1
    mem_fraction_static: Optional[float] = None
    disable_radix_cache: bool = False
    cuda_graph_bs: Optional[List[int]] = None
    _hidden: int = 0

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
    load_format: A[str, Arg(help="The format.", choices=CHOICES)] = "auto"
"""


def test_both_forms_of_the_record_are_read():
    old = {option.name: option for option in options_in(ast.parse(OLD), of_record=True)}
    assert {name: option.type for name, option in old.items()} == {
        "model_path": str,
        "tp_size": int,
        "mem_fraction_static": float,
        "disable_radix_cache": bool,
        "cuda_graph_bs": list[int],
    }
    new = list(options_in(ast.parse(NEW), of_record=False))
    assert new == [
        ServerOption("mem_fraction_static", float, "Share of the memory."),
        ServerOption("load_format", str, "The format."),
    ]


def test_driver_module_is_light():
    code = (
        "import sys, slime_sglang.plugin\n"
        "heavy = {'torch', 'transformers', 'ray', 'numpy', 'sglang', 'aiohttp'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_config(monkeypatch):
    options = (ServerOption("mem_fraction_static", float, "Doc."), ServerOption("model_path", str, "Doc."))
    monkeypatch.setattr("slime_sglang.plugin.options_of_server", lambda: options)
    config = make_config()
    assert server_options(config(mem_fraction_static="0.5")) == {"mem_fraction_static": 0.5}
    assert server_options(config()) == {}
    with pytest.raises(ValidationError, match=r"decided by model\.hf_checkpoint"):
        config(model_path="/elsewhere")
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
    with pytest.raises(EngineError, match="must hold one token"):
        read_token(str(path))
    with pytest.raises(EngineError, match="cannot be read"):
        read_token(str(tmp_path / "missing"))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"external_engine_addrs": ("a:1", "b:2", "c:3"), "servers": 2}, "not a multiple"),
        ({"external_engine_addrs": ("a:1",), "deterministic": True}, "whoever started"),
        ({"router_options": {"cache_threshold": 0.5}}, "there is no router"),
        ({"prefill_servers": 1, "router_policy": "random"}, "Say engine.servers = 2 or more"),
        ({"prefill_servers": 1, "servers": 2}, "a router has to pair the servers"),
        ({"prefill_servers": 1, "servers": 2, "router_policy": "random", "pause_mode": "retract"}, "is on two servers"),
    ],
)
def test_what_does_not_go_together(options, words, monkeypatch):
    monkeypatch.setattr("slime_sglang.plugin.options_of_server", lambda: (ServerOption("model_path", str, "Doc."),))
    (problem,) = Sglang.problems(SglangOptions(**options))
    assert words in problem


def test_a_missing_sglang_is_a_problem(monkeypatch):
    monkeypatch.setattr("slime_sglang.plugin.options_of_server", tuple)
    (problem,) = Sglang.problems(SglangOptions())
    assert "not installed" in problem
    assert Sglang.problems(SglangOptions(external_engine_addrs=("host:1",))) == []


@pytest.mark.parametrize("driver", [Ipc, Distributed])
def test_stages_that_cannot_be_told_apart(driver):
    """SGLang numbers a server's processes by their tensor-parallel rank."""
    engine = SglangOptions.model_construct(pp_size=2)
    (problem,) = driver.problems(driver.Config(), engine)
    assert "engine.pp_size = 2" in problem
    assert "pp_size = 1" in problem
    assert driver.problems(driver.Config(), SglangOptions()) == Disk.problems(Disk.Config(), engine) == []
