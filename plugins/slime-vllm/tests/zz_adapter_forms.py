"""Adapters of a model with images, and of a server over two ranks, beside transformers and peft alone. Each has a server of its
own, so this is run by hand: pytest plugins/slime-vllm/tests/adapter_forms.py"""

import asyncio

import torch
from peft import LoraConfig, get_peft_model
from test_adapter import ADAPTER, AdapterRank, changed, require_responses_of, update, with_adapter
from vllm_setup import PYTHON, require_close, setup_for

from slime_core.types.completion import GenerateRequest, SamplingParams
from slime_models.media.image_processor import ImageProcessor
from slime_plugin_kit.tiny_vision import image_log_probs_of, image_prompt, load_plain_vision, noise, with_stand_in
from slime_vllm.plugin import Vllm


async def started(folder, run_dir, **setup):
    engine = Vllm.build(Vllm.Config(python=str(PYTHON), start_timeout=3000))
    await engine.start(setup_for(folder, run_dir, **ADAPTER, **setup))
    return engine


async def test_an_adapter_of_a_model_with_images(vision_model, tmp_path):
    torch.manual_seed(3)
    config = LoraConfig(r=4, lora_alpha=12, target_modules=["q_proj", "v_proj", "down_proj"])
    trained = changed(get_peft_model(load_plain_vision(vision_model, torch.float32), config).eval(), 0)
    rank = AdapterRank(tmp_path / "run", trained)
    processor = ImageProcessor(vision_model)
    picture = noise(16, 24, 1)
    prompt = image_prompt(processor, 0, 9, picture, 12, 13)
    engine = await started(vision_model, tmp_path, max_context_len=256)
    try:
        for version in (1, 2):
            changed(trained, version)
            await update(engine, rank, version)
            request = GenerateRequest(
                request_id=f"v{version}",
                token_ids=prompt.token_ids,
                sampling=SamplingParams(max_new_tokens=24),
                seed=version,
                images=prompt.images,
            )
            (response,) = await engine.generate([request])
            assert {span.version for span in response.spans} == {version}

            def apart(model, response=response):
                pixels = [processor.pixels(picture)]
                with torch.no_grad():
                    expected = image_log_probs_of(
                        with_stand_in(model), pixels, prompt.token_ids.tolist(), response.token_ids.tolist()
                    )
                return (expected - torch.tensor(response.log_probs, dtype=torch.float64)).abs()

            weights = load_plain_vision(vision_model)
            assert apart(weights).max() > 0.1
            with_both = get_peft_model(load_plain_vision(vision_model), config)
            with_both.load_state_dict(trained.state_dict())
            found = apart(with_both.double().eval().base_model.model)
            print(f"version {version}: {found.max():.1e} nats at most")
            require_close(found)
    finally:
        await engine.stop()
        await asyncio.to_thread(rank.sender.close)


async def test_each_rank_takes_its_part_of_an_adapter(model, tmp_path):
    trained = with_adapter(model)
    rank = AdapterRank(tmp_path / "run", trained)
    engine = await started(model, tmp_path, num_devices=2)
    try:
        assert engine.ranks_of_server == 2
        for version in (1, 2):
            changed(trained, version)
            await update(engine, rank, version)
            await require_responses_of(engine, trained, version)
    finally:
        await engine.stop()
        await asyncio.to_thread(rank.sender.close)
