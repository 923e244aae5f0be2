"""Options under the names of other versions of SGLang."""

from __future__ import annotations

import pytest
from pydantic import ValidationError

from slime_sglang import config
from slime_sglang.plugin import Sglang
from slime_sglang.renamed_options import other_names
from slime_sglang.server_args import ServerOption

NEW = (
    ServerOption("cuda_graph_max_bs_decode", int, "Doc."),
    ServerOption("cuda_graph_bs_decode", list[int], "Doc."),
    ServerOption("cuda_graph_backend_prefill", str, "Doc.", ("disabled", "breakable", "tc_piecewise")),
    ServerOption("cp_strategy", str, "Doc.", ("zigzag", "interleave")),
)
OLD = (ServerOption("cuda_graph_max_bs", int, "Doc."), ServerOption("disable_piecewise_cuda_graph", bool, "Doc."))


@pytest.fixture
def driver(monkeypatch):
    """`driver(options)` is that of an SGLang with these options."""

    def make(options):
        monkeypatch.setattr(config, "options_of_server", lambda: options)
        monkeypatch.setattr(config, "version", lambda name: "0.6")
        config.names_of_other_versions.cache_clear()
        return type("Driver", (Sglang,), {"Config": config.make_config()})

    yield make
    config.names_of_other_versions.cache_clear()


def test_old_names_set_the_options_of_a_newer_sglang(driver):
    newer = driver(NEW)
    options = newer.Config(
        cuda_graph_max_bs=16,
        cuda_graph_bs=[1, 2],
        disable_piecewise_cuda_graph=True,
        nsa_prefill_cp_mode="in-seq-split",
    )
    assert config.server_options(options) == {
        "cuda_graph_max_bs_decode": 16,
        "cuda_graph_bs_decode": [1, 2],
        "cuda_graph_backend_prefill": "disabled",
        "cp_strategy": "zigzag",
    }
    assert newer.notices(options) == [
        "engine.cuda_graph_bs: SGLang 0.6 calls it cuda_graph_bs_decode, which is set to [1, 2].",
        "engine.cuda_graph_max_bs: SGLang 0.6 calls it cuda_graph_max_bs_decode, which is set to 16.",
        'engine.disable_piecewise_cuda_graph: SGLang 0.6 calls it cuda_graph_backend_prefill, which is set to "disabled".',
        'engine.nsa_prefill_cp_mode: SGLang 0.6 calls it cp_strategy, which is set to "zigzag".',
    ]


def test_workers_get_the_names_of_the_installed_sglang(driver):
    newer = driver(NEW)
    sent = newer.Config(cuda_graph_max_bs=16).model_dump(mode="json")
    assert "cuda_graph_max_bs" not in sent
    received = newer.Config.model_validate(sent)
    assert received.cuda_graph_max_bs_decode == 16
    assert newer.notices(received) == []


def test_new_names_set_the_options_of_an_older_sglang(driver):
    older = driver(OLD)
    options = older.Config(cuda_graph_max_bs_decode=8, cuda_graph_backend_prefill="disabled")
    assert config.server_options(options) == {"cuda_graph_max_bs": 8, "disable_piecewise_cuda_graph": True}


def test_a_value_that_an_older_sglang_cannot_express_is_refused(driver):
    with pytest.raises(ValidationError, match="disable_piecewise_cuda_graph"):
        driver(OLD).Config(cuda_graph_backend_prefill="breakable")


def test_a_switch_that_is_off_sets_nothing(driver):
    newer = driver(NEW)
    options = newer.Config(disable_piecewise_cuda_graph=False)
    assert config.server_options(options) == {}
    assert newer.notices(options) == []


def test_only_one_of_two_names_may_be_set(driver):
    with pytest.raises(ValidationError, match="cuda_graph_max_bs is called cuda_graph_max_bs_decode in the installed"):
        driver(NEW).Config(cuda_graph_max_bs=16, cuda_graph_max_bs_decode=16)


def test_values_under_old_names_are_checked_as_those_of_the_option(driver):
    with pytest.raises(ValidationError, match="valid integer"):
        driver(NEW).Config(cuda_graph_max_bs="many")


def test_names_that_the_installed_sglang_has_are_its_own():
    installed = {"cuda_graph_max_bs", "cuda_graph_max_bs_decode", "prefill_cp_mode", "cp_strategy"}
    assert not {other.name for other in other_names(installed)} & installed
