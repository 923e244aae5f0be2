"""Several adapters over the engine's weights: beside peft, each alone beside all at once to the bit, what is refused."""

import asyncio
from dataclasses import replace

import local_oracle as oracle
import numpy as np
import pytest
import torch
import xxhash
from peft import LoraConfig, get_peft_model

from slime_core.contracts.engine import Capability
from slime_core.contracts.setup import EngineSetup
from slime_core.errors import EngineError, EngineRefused
from slime_core.types.completion import FinishReason
from slime_core.types.weights import Bucket
from slime_local.plugin import Local

TARGETS = ["q_proj", "v_proj", "down_proj", "lm_head"]


def peft_model(folder, seed, rank=3):
    torch.manual_seed(seed)
    config = LoraConfig(r=rank, lora_alpha=2 * rank, target_modules=TARGETS, init_lora_weights=False)
    return get_peft_model(oracle.plain_model(folder), config).eval()


def bucket_of(model):
    found = {
        name.removeprefix("base_model.model.").replace(".default.", "."): tensor.detach().contiguous()
        for name, tensor in model.named_parameters()
        if "lora_" in name
    }
    data = np.concatenate([tensor.view(-1).view(torch.uint8).numpy() for tensor in found.values()])
    data.flags.writeable = False
    return Bucket(
        version=0,
        index=0,
        last=True,
        names=list(found),
        dtypes=["float32"] * len(found),
        shapes=[tuple(tensor.shape) for tensor in found.values()],
        data=data,
        checksum=xxhash.xxh3_64_hexdigest(data),
    )


def requests(prompts, adapter=None, **sampling):
    return [
        replace(oracle.request(f"{adapter}/{number}", prompt, seed=number, **sampling), adapter=adapter)
        for number, prompt in enumerate(prompts)
    ]


def bits(completions):
    return [(one.token_ids.tobytes(), one.log_probs.tobytes(), one.finish_reason) for one in completions]


async def test_samples_are_those_of_peft(engines, llama):
    engine = await engines(llama)
    model = peft_model(llama, 1)
    await engine.load_adapter("one", 2.0, bucket_of(model))
    prompts = oracle.prompts(12, seed=3)
    found = await engine.generate(requests(prompts, "one", temperature=0.8))
    for prompt, completion in zip(prompts, found, strict=True):
        expected = oracle.log_probs(model, prompt, completion.token_ids, 0.8)
        np.testing.assert_allclose(completion.log_probs, expected, atol=1e-4)
    greedy = await engine.generate(requests(prompts, "one", temperature=0.0))
    assert greedy[0].token_ids.tolist() == oracle.greedy(model, prompts[0], 10)
    (plain,) = await engine.generate(requests(prompts[:1]))
    assert not np.allclose(plain.log_probs, oracle.log_probs(model, prompts[0], plain.token_ids), atol=1e-2)


@pytest.mark.bits
async def test_what_is_sampled_does_not_depend_on_the_others(engines, qwen3):
    names = ["a", "b", "c", None]
    prompts = {name: oracle.prompts(5 + number, seed=number) for number, name in enumerate(names)}
    models = {name: peft_model(qwen3, number, rank=number + 1) for number, name in enumerate(names[:3])}
    alone = {}
    for name in names:
        engine = await engines(qwen3)
        if name is not None:
            await engine.load_adapter(name, 2.0, bucket_of(models[name]))
        alone[name] = bits(await engine.generate(requests(prompts[name], name)))
    assert len({tuple(found) for found in alone.values()}) == 4
    engine = await engines(qwen3)
    for name, model in models.items():
        await engine.load_adapter(name, 2.0, bucket_of(model))
    before = sum(parameter.numel() for parameter in engine._model.network.parameters())
    together = await engine.generate([one for name in names for one in requests(prompts[name], name)])
    ends = np.cumsum([len(prompts[name]) for name in names])
    for name, end in zip(names, ends, strict=True):
        assert bits(together[end - len(prompts[name]) : end]) == alone[name]
    by_calls = await asyncio.gather(*(engine.generate(requests(prompts[name], name)) for name in reversed(names)))
    assert {name: bits(found) for name, found in zip(reversed(names), by_calls, strict=True)} == alone
    assert sum(parameter.numel() for parameter in engine._model.network.parameters()) == before
    # Keys and values are held for no adapter without requests.
    assert all(not decoder._slots.store.keys[0].numel() for decoder in engine._adapters.decoders())


@pytest.mark.parametrize("ends", ["abort", "cancel"])
async def test_keys_and_values_are_for_those_that_run(ends, engines, qwen3):
    def held_by():
        return {name: bool(decoder._slots.store.keys[0].numel()) for name, decoder in decoders.items()}

    engine = await engines(qwen3)
    await engine.load_adapter("one", 2.0, bucket_of(peft_model(qwen3, 1)))
    decoders = {None: engine._decoder, "one": engine._adapters.decoder("one")}
    await engine.generate(requests([[3, 4]]))
    assert held_by() == {None: True, "one": False}
    running = asyncio.ensure_future(engine.generate(requests([[3, 4]], "one", max_new_tokens=50, min_new_tokens=50)))
    for _ in range(5):
        await asyncio.sleep(0)
    assert held_by() == {None: False, "one": True}
    if ends == "abort":
        await engine.abort()
    else:
        running.cancel()
    await asyncio.wait([running])
    assert held_by() == {None: False, "one": False}


async def test_prompt_log_probs(engines, llama):
    engine = await engines(llama)
    model = peft_model(llama, 1)
    await engine.load_adapter("one", 2.0, bucket_of(model))
    prompts = [*oracle.prompts(4, seed=5, low=3), np.array([7], np.int32)]
    for name, of in (("one", model), (None, oracle.plain_model(llama))):
        found = await engine.prompt_log_probs(prompts, 3, name)
        for prompt, one in zip(prompts, found, strict=True):
            np.testing.assert_allclose(one.log_probs, oracle.log_probs(of, prompt[:1], prompt[1:]), atol=1e-4)
            assert one.top_ids.shape == one.top_log_probs.shape == (len(prompt) - 1, 3)
            for place in range(len(prompt) - 1):
                probs = oracle.next_probs(of, prompt[: place + 1])
                assert one.top_ids[place].tolist() == np.argsort(-probs)[:3].tolist()
                np.testing.assert_allclose(one.top_log_probs[place], np.log(np.sort(probs)[::-1][:3]), atol=1e-4)
    (none, *_) = await engine.prompt_log_probs(prompts, 0, None)
    assert none.top_ids.shape == (len(prompts[0]) - 1, 0)
    with pytest.raises(EngineRefused, match="top_k = 99"):
        await engine.prompt_log_probs(prompts, 99, None)
    with pytest.raises(EngineRefused, match="no tokens"):
        await engine.prompt_log_probs([np.empty(0, np.int32)], 0, None)


async def test_dropped_while_it_samples(engines, qwen3):
    engine = await engines(qwen3)
    for name in "ab":
        await engine.load_adapter(name, 2.0, bucket_of(peft_model(qwen3, 1)))
    prompts = oracle.prompts(3, seed=9)
    running = asyncio.create_task(engine.generate(requests(prompts, "a", min_new_tokens=50, max_new_tokens=60)))
    others = asyncio.create_task(engine.generate(requests(prompts, "b")))
    for _ in range(5):
        await asyncio.sleep(0)
    await engine.drop_adapter("a")
    await engine.drop_adapter("a")
    assert {one.finish_reason for one in await running} == {FinishReason.ABORT}
    assert FinishReason.ABORT not in {one.finish_reason for one in await others}
    with pytest.raises(EngineRefused, match=r'adapter "a" is not loaded. Loaded: b\.'):
        await engine.generate(requests(prompts, "a"))
    aborted = asyncio.create_task(engine.generate(requests(prompts, "b", min_new_tokens=50, max_new_tokens=60)))
    await asyncio.sleep(0)
    await engine.abort(["b/1"])
    await engine.abort()
    assert {one.finish_reason for one in await aborted} == {FinishReason.ABORT}


async def test_a_pause_holds_adapters_too(engines, qwen3):
    engine = await engines(qwen3)
    await engine.load_adapter("a", 2.0, bucket_of(peft_model(qwen3, 1)))
    prompts = oracle.prompts(3, seed=9)
    expected = bits(await engine.generate(requests(prompts, "a")))
    await engine.pause()
    running = asyncio.create_task(engine.generate(requests(prompts, "a")))
    for _ in range(30):
        await asyncio.sleep(0)
    assert not running.done()
    await engine.resume()
    assert bits(await running) == expected


async def test_what_is_refused(engines, qwen3, llama):
    engine = await engines(qwen3, max_adapters=1)
    good = bucket_of(peft_model(qwen3, 1))
    with pytest.raises(EngineError, match="is damaged"):
        await engine.load_adapter("a", 2.0, replace(good, checksum="0"))
    strange = replace(good, names=[name.replace("q_proj", "r_proj") for name in good.names])
    with pytest.raises(EngineRefused, match="r_proj, and the model has no such linear layer"):
        await engine.load_adapter("a", 2.0, strange)
    with pytest.raises(EngineRefused, match="some are no LoRA matrices"):
        await engine.load_adapter("a", 2.0, replace(good, names=["x", *good.names[1:]]))
    await engine.load_adapter("a", 2.0, good)
    with pytest.raises(EngineRefused, match="name is in use"):
        await engine.load_adapter("a", 2.0, good)
    with pytest.raises(EngineRefused, match=r"holds 1 already. Drop one, or set a larger engine.max_adapters"):
        await engine.load_adapter("b", 2.0, good)
    with pytest.raises(EngineRefused, match=r"Set engine.max_adapters"):
        await (await engines(qwen3, max_adapters=0)).load_adapter("a", 2.0, good)


@pytest.mark.parametrize(
    ("options", "on_policy", "has"), [({}, False, True), ({"max_adapters": 0}, False, False), ({}, True, False)]
)
async def test_the_capability(qwen3, options, on_policy, has):
    engine = Local.build(Local.Config(**options))
    setup = EngineSetup(
        index=0,
        model_path=qwen3,
        device="cpu",
        seed=0,
        max_context_len=64,
        max_batch=8,
        run_dir=qwen3,
        true_on_policy=on_policy,
    )
    try:
        assert (Capability.ADAPTERS in (await engine.start(setup)).capabilities) == has
    finally:
        await engine.stop()
    assert Local.max_adapters(Local.Config(**options)) == options.get("max_adapters", 64)
