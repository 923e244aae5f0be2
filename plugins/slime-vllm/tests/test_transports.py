"""Transports with senders on a real vLLM server, beside transformers alone. The model's head is tied: no transport sends it."""

import asyncio

import numpy as np
import pytest
import torch

from slime_core.errors import EngineError
from slime_core.types.completion import GenerateRequest, SamplingParams
from slime_plugin_kit.one_rank import OneRank
from slime_plugin_kit.tiny_model import load_plain, log_probs_of, moved
from slime_transports import folder
from slime_transports.plugin import Delta, Disk, Distributed, Ipc

pytestmark = pytest.mark.vllm

CLOSE = 1e-4
"""Nats, of float32 and float64."""
PROMPT = [5, 6, 7, 8, 9, 10]


async def require_responses_of(engine, model, version):
    sampling = SamplingParams(max_new_tokens=24, temperature=0.8)
    request = GenerateRequest(
        request_id=f"v{version}", token_ids=np.array(PROMPT, np.int32), sampling=sampling, seed=version
    )
    (got,) = await asyncio.wait_for(engine.generate([request]), 60)
    with torch.no_grad():
        expected, _ = log_probs_of(model.double(), PROMPT, got.token_ids.tolist(), 0.8)
    model.float()
    assert len(got.token_ids) > 0
    assert np.abs(expected.numpy() - got.log_probs).max() < CLOSE
    assert {span.version for span in got.spans} == {version}


def require_served(served, model, apart=CLOSE):
    """Asks the server itself, which the engine keeps paused: its log-probs of a prompt are the model's, within `apart`."""
    served.ask("/reset_prefix_cache", {})
    assert served.ask("/resume", {})[0] == 200
    params = {"max_tokens": 1, "temperature": 1.0, "prompt_logprobs": 0, "detokenize": False}
    body = {"request_id": f"raw-{id(model)}-{apart}", "token_ids": PROMPT, "sampling_params": params, "stream": False}
    status, reply = served.ask("/inference/v1/generate", body)
    assert status == 200
    served.ask("/pause?mode=abort", {})
    entries = zip(PROMPT[1:], reply["prompt_logprobs"][1:], strict=True)
    found = np.array([entry[str(token)]["logprob"] for token, entry in entries])
    with torch.no_grad():
        expected, _ = log_probs_of(model.double(), PROMPT[:1], PROMPT[1:])
    model.float()
    return float(np.abs(expected.numpy() - found).max())


@pytest.mark.parametrize("driver", [Disk, Delta, Ipc, Distributed])
async def test_the_engine_responds_as_transformers_with_the_new_weights(driver, attached, model, tmp_path):
    """And each time the server finds that it holds the trainer's weights."""
    plain = load_plain(model, torch.float32)
    rank = OneRank(driver, tmp_path / "run", plain, check_weight_update_equal=True)
    try:
        async with attached() as engine:
            for version in (1, 2, 3):
                # At last a single element: of a delta, one position.
                if version < 3:
                    moved(plain, seed=version)
                else:
                    with torch.no_grad():
                        next(plain.parameters())[5, 5] += 0.5
                await engine.pause()
                report = await rank.push(engine, version)
                await engine.resume()
                assert (report.version, report.buckets > 5, report.compared_with) == (version, True, "trainer")
                await require_responses_of(engine, plain, version)
        assert driver is not Delta or report.bytes_sent < 2000
        assert driver is Delta or report.bytes_sent > 100_000
    finally:
        await asyncio.to_thread(rank.sender.close)


def damage(path, manifest):
    file = path / manifest.buckets[2].file
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(content)


def make_unreadable(path, manifest):
    (path / manifest.buckets[3].file).unlink()


@pytest.mark.parametrize(
    ("break_it", "text"), [(damage, "bucket 2 of version 2 .*checksum"), (make_unreadable, "bucket 3 of")]
)
async def test_a_broken_folder_leaves_the_old_weights(break_it, text, attached, served, model, tmp_path, monkeypatch):
    """Of a version that is damaged in its middle, nothing is loaded; a delta's base stays what it was."""
    plain = load_plain(model, torch.float32)
    disk, delta = OneRank(Disk, tmp_path / "disk", plain), OneRank(Delta, tmp_path / "delta", plain)
    finish = folder.finish

    def broken(beside, manifest):
        path = finish(beside, manifest)
        break_it(path, manifest)
        return path

    try:
        async with attached() as engine:
            await engine.pause()
            await delta.push(engine, 1)
            old = load_plain(model, torch.float32)
            moved(plain, seed=7)
            for rank in (disk, delta):
                with monkeypatch.context() as patched:
                    patched.setattr(folder, "finish", broken)
                    with pytest.raises(EngineError, match=rf"engine 0 .*{text}"):
                        await rank.push(engine, 2)
                assert require_served(served, old) < CLOSE < require_served(served, plain)
                assert served.ask("/weight_info")[1] == {"weight_version": "1"}
            with pytest.raises(EngineError, match="resume while a version is partly loaded"):
                await engine.resume()
            await delta.push(engine, 2)
            await engine.resume()
            await require_responses_of(engine, plain, 2)
    finally:
        for rank in (disk, delta):
            await asyncio.to_thread(rank.sender.close)


@pytest.mark.parametrize("driver", [Ipc, Distributed])
async def test_after_a_broken_bucket_nothing_is_served_until_all_are_there(driver, attached, model, tmp_path):
    """vLLM keeps tensors of a layer until it has all: those of the version that failed must not complete the next one's."""
    plain = load_plain(model, torch.float32)
    rank = OneRank(driver, tmp_path / "run", plain)
    export = rank.export

    def broken(*, all_ranks):
        for tensors in export(all_ranks=all_ranks):
            yield {
                name: tensor[:1] if "layers.1.self_attn.k_proj" in name else tensor for name, tensor in tensors.items()
            }

    try:
        async with attached() as engine:
            await engine.pause()
            await rank.push(engine, 1)
            moved(plain, seed=1)
            rank.export = broken
            with pytest.raises(EngineError, match=r"version 2 .*engine 0"):
                await rank.push(engine, 2)
            with pytest.raises(EngineError, match="resume while a version is partly loaded"):
                await engine.resume()
            moved(plain, seed=2)
            rank.export = export
            await rank.push(engine, 2)
            await engine.resume()
            await require_responses_of(engine, plain, 2)
    finally:
        await asyncio.to_thread(rank.sender.close)


def with_second_copy(sender, monkeypatch, *, before=lambda: None, left_out=()):
    """`before` is called when the server has a version, and has not been asked to compare it; tensors are left out then."""
    send = sender.send_version

    def send_version(layers, update):
        if update.compares:
            before()
            layers = ({name: tensor for name, tensor in layer.items() if name not in left_out} for layer in layers)
        return send(layers, update)

    monkeypatch.setattr(sender, "send_version", send_version)


CHANGED = {
    "model.embed_tokens.weight": "model.embed_tokens.weight[0, 3]",
    "model.layers.0.input_layernorm.weight": "model.layers.0.input_layernorm.weight[3]",
    "model.layers.0.mlp.down_proj.weight": "model.layers.0.mlp.down_proj.weight[0, 3]",
    "model.layers.1.self_attn.k_proj.weight": "model.layers.1.self_attn.k_proj.weight "
    "(model.layers.1.self_attn.qkv_proj.weight[64, 3])",
    "lm_head.weight": "lm_head.weight[0, 3]",
}
"""Where the third element of a parameter is in vLLM. The head is the embedding, and packed by itself on a CPU."""


@pytest.mark.parametrize("driver", [Disk, Delta, Ipc, Distributed])
async def test_a_server_that_holds_other_weights_names_them(driver, attached, model, tmp_path, monkeypatch):
    """An element of each of these parameters changes in the server before it compares them."""
    plain, other = load_plain(model, torch.float32), load_plain(model, torch.float32)
    rank = OneRank(driver, tmp_path / "run", plain, check_weight_update_equal=True)
    changer = OneRank(Ipc, tmp_path / "other", other)
    with torch.no_grad():
        for name in CHANGED:
            other.get_parameter(name).view(-1)[3] = 0.5
    try:
        async with attached() as engine:
            await engine.pause()
            endpoints = await engine.endpoints()
            with monkeypatch.context() as patched:
                with_second_copy(rank.sender, patched, before=lambda: changer.sender.send(changer.export, 1, endpoints))
                with pytest.raises(EngineError, match=r"version 1.*engine 0") as failed:
                    await rank.push(engine, 1)
            found = str(failed.value).split("are not those that were sent again: ")[1]
            for place, name in zip(CHANGED.values(), CHANGED, strict=True):
                sent = float(plain.get_parameter(name).view(-1)[3].detach())
                assert f"{place} is 0.5, and was sent as {sent}" in found
            assert len(found.split("; ")) == len(CHANGED)
            assert (await rank.push(engine, 1)).compared_with == "trainer"
            await engine.resume()
            await require_responses_of(engine, plain, 1)
    finally:
        for sender in (rank.sender, changer.sender):
            await asyncio.to_thread(sender.close)


async def test_what_is_not_sent_again_is_not_taken_for_equal(attached, model, tmp_path, monkeypatch):
    plain = load_plain(model, torch.float32)
    rank = OneRank(Ipc, tmp_path / "run", plain, check_weight_update_equal=True)
    left_out = ["model.norm.weight", "model.layers.1.self_attn.k_proj.weight", "model.embed_tokens.weight"]
    try:
        async with attached() as engine:
            await engine.pause()
            with monkeypatch.context() as patched:
                with_second_copy(rank.sender, patched, left_out=left_out)
                with pytest.raises(EngineError) as failed:
                    await rank.push(engine, 1)
            for text in (
                "of model.layers.1.self_attn.qkv_proj.weight only 6144 of 8192 elements were sent "
                "(model.layers.1.self_attn.q_proj.weight, model.layers.1.self_attn.v_proj.weight)",
                "model.norm.weight was not sent",
                "model.embed_tokens.weight was not sent",
                "lm_head.weight was not sent",
            ):
                assert text in str(failed.value)
            # What it compared with is what it serves.
            await rank.push(engine, 1)
            await engine.resume()
            await require_responses_of(engine, plain, 1)
    finally:
        await asyncio.to_thread(rank.sender.close)
