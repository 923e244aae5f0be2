"""The transport `adapter` on a real vLLM server that has the frozen weights, beside transformers and peft alone."""

import asyncio

import numpy as np
import pytest
import torch
from carried_run import metrics_of, slime, write_run
from peft import LoraConfig, PeftModel, get_peft_model, get_peft_model_state_dict
from served import Served
from vllm_setup import LONG, PYTHON, asked, differences, endless, require_close, setup_for

from slime_core.errors import EngineError
from slime_core.types.completion import FinishReason
from slime_plugin_kit import adapters_case
from slime_plugin_kit.event_loop import BackgroundLoop
from slime_plugin_kit.one_rank import OneRank
from slime_plugin_kit.served_tenants_case import require_tenants_are_served
from slime_plugin_kit.tiny_model import load_plain, log_probs_of
from slime_transports import folder
from slime_transports.plugin import Adapter
from slime_vllm.adapter import NAME
from slime_vllm.plugin import Vllm

pytestmark = pytest.mark.vllm

ADAPTER = {"transport": "adapter", "adapter_rank": 4}
HELD = {"max_adapters": 3, "max_adapter_rank": 8, "adapters_at_once": 2}
PROMPT = [5, 6, 7, 8, 9, 10] * 50
"""More than a block of vLLM's prefix cache, of 128 tokens on a CPU."""


class AdapterRank(OneRank):
    """Of a trainer with peft's model. `renamed`: a part of the names, and what it is exported as."""

    renamed = ("", "")

    def __init__(self, run_dir, model):
        config = model.peft_config["default"].to_dict()
        content = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
        super().__init__(Adapter, run_dir, model, adapter_config=content)

    def export(self, *, all_ranks):
        for name, tensor in get_peft_model_state_dict(self.model).items():
            yield {name.replace(*self.renamed): tensor.float()}


def with_adapter(model, **options):
    torch.manual_seed(3)
    config = LoraConfig(**({"r": 4, "lora_alpha": 12, "target_modules": ["q_proj", "v_proj", "down_proj"]} | options))
    return changed(get_peft_model(load_plain(model, torch.float32), config).eval(), 0)


def changed(trained, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if ".lora_" in name:
                parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return trained


@pytest.fixture(scope="module")
def served(model, tmp_path_factory):
    """In place of the session's, which has no layers for adapters. It has places for several."""
    run_dir = tmp_path_factory.mktemp("run")
    background = BackgroundLoop()
    engine = Vllm.build(Vllm.Config(python=str(PYTHON), start_timeout=580, **HELD))
    try:
        info = background.run(engine.start(setup_for(model, run_dir, max_batch=128, transport="frozen")))
        yield Served(info, [info.address], model, run_dir, engine, background)
    finally:
        background.run(engine.stop())
        background.close()


@pytest.fixture
def attached(served, model, tmp_path):
    """`async with attached() as (engine, rank)`: an engine on the server, and a trainer with peft's model for it."""

    class Attached:
        def __init__(self, trained, **options):
            self.engine = served.attach(**options)
            self.rank = AdapterRank(tmp_path / "run", trained)

        async def __aenter__(self):
            await self.engine.start(setup_for(model, tmp_path, **ADAPTER))
            return self.engine, self.rank

        async def __aexit__(self, *failure):
            await self.engine.stop()
            await asyncio.to_thread(self.rank.sender.close)

    return Attached


def apart(trained, request, response):
    found = differences(trained.double(), request, response)
    trained.float()
    return found


async def require_responses_of(engine, trained, version):
    request = asked(f"v{version}", PROMPT, seed=version, temperature=0.8)
    (response,) = await engine.generate([request])
    require_close(apart(trained, request, response))
    assert {span.version for span in response.spans} == {version}
    return response


async def test_several_adapters_at_once(served, model, tmp_path):
    """Before the transport's: of a server with one more it would not be known which one an update replaces."""
    engine = served.attach(**HELD)
    await engine.start(setup_for(model, tmp_path, transport="frozen"))
    try:
        await engine.pause()
        await engine.keep_weights(0)
        await engine.resume()
        await adapters_case.require_two_adapters(engine, model)
        await adapters_case.require_refusals(engine, model, most=3, rank=8)
    finally:
        await engine.stop()


def test_tenants_of_slime_serve_sample_with_their_own_adapters(served, model, tmp_path):
    table = {
        "name": "vllm",
        **HELD,
        "external_engine_addrs": [served.address],
        "external_engine_token_file": str(served.token_file),
    }
    require_tenants_are_served(tmp_path, model, table, unembed=True)
    assert len(served.ask("/v1/models")[1]["data"]) == 1


async def update(engine, rank, version):
    await engine.pause()
    report = await rank.push(engine, version)
    await engine.resume()
    return report


@pytest.mark.parametrize(
    "options",
    [{}, {"use_rslora": True, "rank_pattern": {"q_proj": 2}, "alpha_pattern": {"down_proj": 7}}],
    ids=["plain", "scaled by layer"],
)
async def test_the_engine_responds_as_peft_with_the_new_adapter(options, attached, served, model):
    trained = with_adapter(model, **options)
    num_bytes = sum(tensor.nbytes for tensor in get_peft_model_state_dict(trained).values())
    async with attached(trained) as (engine, rank):
        for version in (1, 2, 3):
            changed(trained, version)
            report = await update(engine, rank, version)
            assert (report.version, report.buckets, report.bytes_sent) == (version, 1, num_bytes)
            # Nothing of the prompt by the adapter before is in the cache, and then what this one computed.
            assert (await require_responses_of(engine, trained, version)).cached_tokens == 0
            assert (await require_responses_of(engine, trained, version)).cached_tokens > 0
        with trained.disable_adapter():
            request = asked("base", PROMPT)
            assert apart(trained, request, (await engine.generate([request]))[0]).max() > 0.1
    # One adapter, under one name; files of older ones are gone.
    assert [row["id"] for row in served.ask("/v1/models")[1]["data"]][1:] == [NAME]


async def test_requests_that_wait_inside_vllm_continue_with_the_new_adapter(attached, served, model):
    trained = with_adapter(model)
    async with attached(trained, pause_mode="retract") as (engine, rank):
        await update(engine, rank, 11)
        requests = [endless(f"k{n}", n) for n in range(3)]
        running = asyncio.create_task(engine.generate(requests))
        await served.until_generating()
        changed(trained, 5)
        await update(engine, rank, 12)
        for request, response in zip(requests, await running, strict=True):
            assert [span.version for span in response.spans] == [11, 12]
            assert (response.finish_reason, len(response.token_ids)) == (FinishReason.LENGTH, LONG)
            require_close(apart(trained, request, response)[response.spans[1].start :])


async def test_an_adapter_that_cannot_be_loaded_is_not_served(attached, served, model, monkeypatch):
    trained = with_adapter(model)
    finish = folder.finish

    def damaged(beside, manifest):
        path = finish(beside, manifest)
        file = path / manifest.buckets[0].file
        content = bytearray(file.read_bytes())
        content[-1] ^= 1
        file.write_bytes(content)
        return path

    async with attached(trained) as (engine, rank):
        await update(engine, rank, 21)
        await engine.pause()
        with monkeypatch.context() as patched:
            patched.setattr(folder, "finish", damaged)
            with pytest.raises(
                EngineError, match=r"adapter of version 22: engine 0 .*bucket 0 of version 22 .*checksum"
            ):
                await rank.push(engine, 22)
        with pytest.raises(EngineError, match="resume while a version is partly loaded"):
            await engine.resume()
        assert served.ask("/weight_info")[1] == {"weight_version": "21"}
        # vLLM takes these names for layers that the model does not have, and would serve the weights without them.
        rank.renamed = ("layers.1", "layers.9")
        with pytest.raises(EngineError, match=r"\d parts of the adapter belong to no layer of vLLM's"):
            await rank.push(engine, 23)
        rank.renamed = ("", "")
        await rank.push(engine, 24)
        await engine.resume()
        await require_responses_of(engine, trained, 24)


async def test_a_server_without_room_for_the_rank_is_refused(served, model, tmp_path):
    engine = served.attach()
    with pytest.raises(
        EngineError, match=r"start this server with VLLM_ALLOW_RUNTIME_LORA_UPDATING=1, .*--max-lora-rank 64"
    ):
        await engine.start(setup_for(model, tmp_path, transport="adapter", adapter_rank=64))


def test_a_run_trains_an_adapter_that_another_engine_began(served, model, tmp_path):
    """The first part merges for the engine; the second begins on a server that has another adapter."""
    write_run(tmp_path, model)
    text = (tmp_path / "run.toml").read_text()
    (tmp_path / "run.toml").write_text(text.replace('"math"', '"random"').replace("save_hf = false", "save_hf = true"))
    lora = ["--lora-rank", "4", "--lora-alpha", "8"]
    slime(tmp_path, *lora, "--engine", "local", "--num-rollout", "2")
    words = ["--engine", "vllm", "--transport", "adapter", "--vllm-external-engine-addrs", served.address]
    words += ["--vllm-external-engine-token-file", str(served.token_file)]
    run = slime(tmp_path, *lora, *words, "--resume", "runs/carried", "--num-rollout", "4")
    steps = metrics_of(run, "train/step")
    assert len(steps) == 4
    assert max(step["train/train_rollout_logprob_abs_diff"] for step in steps) < 1e-5
    assert min(step["train/grad_norm"] for step in steps) > 0
    merged, adapters = np.split(
        np.array([row["perf/update_weights_wire_bytes"] for row in metrics_of(run, "rollout/step")]), 2
    )
    assert max(adapters) < min(merged) / 5
    require_serves(served, model, run / "hf/adapter")


def require_serves(served, model, adapter):
    """The server's log-probs of a prompt are those of peft with this folder."""
    params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
    body = {"request_id": f"{adapter}", "token_ids": PROMPT, "sampling_params": params, "stream": False}
    status, reply = served.ask("/inference/v1/generate", body | {"model": NAME})
    assert status == 200
    entries = zip(PROMPT[1:], reply["prompt_logprobs"][1:], strict=True)
    found = np.array([entry[str(token)]["logprob"] for token, entry in entries])
    trained = PeftModel.from_pretrained(load_plain(model), adapter).double()
    with torch.no_grad():
        expected, _ = log_probs_of(trained, PROMPT[:1], PROMPT[1:])
    assert np.abs(expected.numpy() - found).max() < 1e-4
