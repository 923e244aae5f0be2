"""Several adapters on a real SGLang server, beside transformers and peft, and a loop of one's own that samples by it."""

import asyncio
from dataclasses import replace
from functools import partial

import pytest
from engine_setup import setup_for

from slime_core.errors import EngineError, EngineRefused
from slime_plugin_kit import adapters_case
from slime_plugin_kit.adapters_case import ALL, bucket_of, peft_model, refused
from slime_plugin_kit.event_loop import BackgroundLoop
from slime_plugin_kit.served_tenants_case import require_tenants_are_served
from slime_plugin_kit.tiny_model import TINY, make_tiny_model
from slime_sglang.plugin import Sglang

pytestmark = pytest.mark.sglang

HELD = {"max_adapters": 3, "max_adapter_rank": 8, "adapters_at_once": 2}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """SGLang for CPUs pads other widths."""
    return make_tiny_model(tmp_path_factory.mktemp("model") / "wide", replace(TINY, intermediate_size=64))


@pytest.fixture(scope="module")
def held(model, tmp_path_factory):
    """A server with adapters; calls of its engine run in another thread."""
    run_dir = tmp_path_factory.mktemp("run")
    background = BackgroundLoop()
    engine = Sglang.build(Sglang.Config(start_timeout=580, **HELD))
    try:
        background.run(engine.start(setup_for(model, run_dir, transport="frozen")))
        background.run(keep_weights(engine))
        yield engine, background.run
    finally:
        background.run(engine.stop())
        background.close()


async def keep_weights(engine):
    await engine.pause()
    await engine.keep_weights(0)
    await engine.resume()


def test_two_adapters_at_once(held, model, monkeypatch):
    # Without the output layer: see the next test.
    monkeypatch.setattr(adapters_case, "peft_model", partial(without_head, peft_model))
    engine, run = held
    run(adapters_case.require_two_adapters(engine, model))
    run(adapters_case.require_refusals(engine, model, most=HELD["max_adapters"], rank=HELD["max_adapter_rank"]))


def without_head(original, folder, seed, *, targets=ALL[:-1], rank=4):
    return original(folder, seed, targets=targets, rank=rank)


def test_tenants_of_slime_serve_sample_with_their_own_adapters(held, model, tmp_path):
    engine, run = held
    (server,) = engine._fleet.servers
    (tmp_path / "token").write_text(server.token)
    table = {
        "name": "sglang",
        **HELD,
        "external_engine_addrs": [server.address],
        "external_engine_token_file": str(tmp_path / "token"),
    }
    require_tenants_are_served(tmp_path, model, table, unembed=False)
    assert len(run(server.get("/v1/models", timeout_s=60))["data"]) == 1


def test_the_output_layer_is_refused_on_a_cpu(held, model):
    engine, run = held
    run(refused(engine.load_adapter("head", 2.0, bucket_of(peft_model(model, 1))), "train_unembed=False"))


def test_widths_that_are_padded_are_refused_before_the_start(tmp_path):
    engine = Sglang.build(Sglang.Config(**HELD))
    narrow = make_tiny_model(tmp_path / "narrow")
    with pytest.raises(EngineError, match=r"engine\.max_adapters = 3: on a CPU SGLang pads MLPs"):
        asyncio.run(engine.start(setup_for(narrow, tmp_path, transport="frozen")))


def test_an_engine_without_adapters_names_the_option(tmp_path, tiny, attached):
    async def load():
        engine = attached()
        await engine.start(setup_for(tiny, tmp_path))
        try:
            with pytest.raises(EngineRefused, match=r"Set engine\.max_adapters"):
                await engine.load_adapter("one", 2.0, bucket_of(peft_model(tiny, 1)))
        finally:
            await engine.stop()

    asyncio.run(load())
