"""vLLM on GPUs in every form of a server that a small model can show: tensor and data parallel, with drafts, in float8, with
adapters, with images, asleep. What each responds after new weights is what transformers computes.

`pytest tests/gpu/test_vllm_servers.py -m gpu -s`: needs vLLM in `.venv-vllm` or in this interpreter, and two GPUs for most. A
start of vLLM takes two minutes, so the servers of all chosen tests start side by side, and share the GPUs. Each test has a time
limit of its own after that."""

from __future__ import annotations

import asyncio
import sys
import time
from collections.abc import Callable, Coroutine, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from peft import LoraConfig, get_peft_model, get_peft_model_state_dict
from torch import Tensor

from slime_core.contracts.engine import MemoryTag
from slime_core.contracts.setup import EngineSetup
from slime_core.types.completion import Completion, FinishReason, GenerateRequest, SamplingParams
from slime_models.media.image_processor import ImageProcessor
from slime_models.new_model import ModelSizes, new_model
from slime_models.new_vision_model import VisionSizes, new_vision_model
from slime_plugin_kit.event_loop import BackgroundLoop
from slime_plugin_kit.one_rank import OneRank
from slime_plugin_kit.tiny_model import load_plain, log_probs_of, moved
from slime_plugin_kit.tiny_vision import image_log_probs_of, image_prompt, load_plain_vision, noise, with_stand_in
from slime_transports.plugin import Adapter, Delta, Disk, Distributed, Ipc
from slime_vllm.plugin import Vllm

pytestmark = pytest.mark.gpu

OWN = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
START_S, LIMIT_S = 330.0, 90.0
PROMPT = [5, 6, 7, 8, 9, 10] * 4
ALPHABET = "0123456789+= abcdefghij"
CLOSE = 0.2
"""Nats, the mean over responses, of bfloat16 and float64: see test_vllm_weights.py."""
FAR = 2.0
"""Nats: no single token of bfloat16 is so far off. Log-probs of other tokens than the response's are."""
LONG = 900
SIZES = ModelSizes(
    hidden_size=256,
    num_layers=4,
    num_heads=4,
    num_kv_heads=2,
    intermediate_size=512,
    max_length=2048,
    tie_word_embeddings=True,
)
VISION = VisionSizes(hidden_size=64, num_layers=2, num_heads=2, intermediate_size=128, patch_size=4, max_pixels=24 * 24)
LENT = {"gpu_memory_utilization": 0.05, "kv_cache_memory_bytes": 2**29}
"""Servers that start side by side cannot measure what is free."""
EAGER = {"enforce_eager": True}
ADAPTER = {"transport": "adapter", "adapter_rank": 8}


@dataclass(frozen=True)
class Form:
    """How a server is started."""

    options: Mapping[str, Any] = field(default_factory=lambda: EAGER)
    setup: Mapping[str, Any] = field(default_factory=dict)
    folder: str = "first"
    draft: str | None = None
    """Folder of a model that drafts."""


FORMS: Mapping[str, Form] = {
    # With CUDA graphs and the all-reduce of vLLM's own.
    "tensor parallel": Form({}, {"num_devices": 2}),
    "on the other GPU": Form(setup={"first_device": 1, "transport": "distributed"}),
    "float8": Form({"quantization": "fp8"} | EAGER, {"transport": "ipc"}),
    "float8 of the second": Form({"quantization": "fp8"} | EAGER, folder="second"),
    "n-grams": Form(
        {"speculative_config": {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 3}}
        | EAGER,
        {"first_device": 1},
    ),
    "drafts": Form({"spec_method": "draft_model", "spec_tokens": 3} | EAGER, {"first_device": 1}, draft="first"),
    "adapter, tensor parallel": Form(setup={"num_devices": 2} | ADAPTER),
    "adapter, float8": Form({"quantization": "fp8"} | EAGER, {"first_device": 1} | ADAPTER),
    "adapter, images": Form(setup=ADAPTER, folder="vision"),
    "replicas": Form({"data_parallel_size": 2, "pause_mode": "retract"} | EAGER, {"num_devices": 2}),
    "asleep": Form(
        {"servers": 2, "sleep_level": 2, "kv_cache_memory_bytes": 2**32} | EAGER, {"num_devices": 2, "offload": True}
    ),
}  # fmt: skip


def on(*forms: str) -> Callable[[Any], Any]:
    """The test needs these servers."""

    def marked(test: Any) -> Any:
        test.servers = forms
        return test

    return marked


def adapted(model: Any, targets: Sequence[str]) -> Any:
    torch.manual_seed(3)
    trained: Any = get_peft_model(model, LoraConfig(r=8, lora_alpha=16, target_modules=list(targets))).eval()
    return adapter_moved(trained, 0)


def adapter_moved(trained: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in trained.named_parameters():
            if ".lora_" in name:
                parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return trained


class AdapterRank(OneRank):
    """Of a trainer with peft's model."""

    def __init__(self, run_dir: Path, model: Any) -> None:
        config = model.peft_config["default"].to_dict()
        content = {key: sorted(value) if isinstance(value, set) else value for key, value in config.items()}
        super().__init__(Adapter, run_dir, model, adapter_config=content)

    def export(self, *, all_ranks: bool) -> Iterator[Mapping[str, Tensor]]:
        model: Any = self.model
        for name, tensor in get_peft_model_state_dict(model).items():
            yield {name: tensor.detach().float()}


class Servers:
    """The engines that the chosen tests need, which start together."""

    def __init__(self, folder: Path, names: Sequence[str]) -> None:
        self.folder = folder
        self._background = BackgroundLoop()
        self._versions = 0
        new_model(folder / "first", "qwen3", SIZES, alphabet=ALPHABET, seed=3, initializer_range=0.1)
        new_model(folder / "second", "qwen3", SIZES, alphabet=ALPHABET, seed=4, initializer_range=0.1)
        if any(FORMS[name].folder == "vision" for name in names):
            new_vision_model(folder / "vision", SIZES, VISION, alphabet=ALPHABET, seed=3, initializer_range=0.1)
        self.engines: dict[str, Any] = {name: self._engine(FORMS[name]) for name in names}
        self._starts = self._background.run(self._begin())

    def _engine(self, form: Form) -> Any:
        options = LENT | form.options
        if form.draft is not None:
            options |= {"spec_model": str(self.folder / form.draft)}
        return Vllm.build(Vllm.Config(python=str(OWN) if OWN.exists() else sys.executable, **options))

    async def _begin(self) -> dict[str, asyncio.Task[float]]:
        return {name: asyncio.create_task(self._start(name)) for name in self.engines}

    async def _start(self, name: str) -> float:
        form, began = FORMS[name], time.monotonic()
        run_dir = self.folder / name.replace(", ", "-").replace(" ", "-")
        run_dir.mkdir()
        settings = {"index": 0, "seed": 0, "max_context_len": 1024, "max_batch": 16, "transport": "disk"} | form.setup
        await self.engines[name].start(
            EngineSetup(model_path=self.folder / form.folder, device="cuda", run_dir=run_dir, **settings)
        )
        print(f"{name}: up after {time.monotonic() - began:.0f} s", flush=True)
        return time.monotonic() - began

    def play(self, scene: Coroutine[Any, Any, None], *names: str, limit_s: float = LIMIT_S) -> None:
        """Runs a scene when the servers of these names are up."""

        async def limited() -> None:
            try:
                async with asyncio.timeout(START_S):
                    for name in names:
                        await asyncio.shield(self._starts[name])
            except BaseException:
                scene.close()
                raise
            async with asyncio.timeout(limit_s):
                await scene

        self._background.run(limited(), START_S + limit_s + 30)

    def next_version(self) -> int:
        self._versions += 1
        return self._versions

    def close(self) -> None:
        async def stop() -> None:
            for start in self._starts.values():
                start.cancel()
            await asyncio.gather(*self._starts.values(), return_exceptions=True)
            await asyncio.gather(*(engine.stop() for engine in self.engines.values()), return_exceptions=True)

        self._background.run(stop(), 120)
        self._background.close()


@pytest.fixture(scope="module")
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    needed = [
        name for item in request.session.items for name in getattr(getattr(item, "function", None), "servers", ())
    ]
    started = Servers(tmp_path_factory.mktemp("servers"), list(dict.fromkeys(needed)))
    yield started
    started.close()


def asked(number: int, version: int, **sampling: Any) -> GenerateRequest:
    return GenerateRequest(
        request_id=f"v{version}-{number}",
        token_ids=np.array([*PROMPT, 11 + number], np.int32),
        sampling=SamplingParams(**({"max_new_tokens": 32} | sampling)),
        seed=100 * version + number,
    )


def differences(model: Any, request: GenerateRequest, response: Completion) -> npt.NDArray[np.float64]:
    with torch.no_grad():
        expected, _ = log_probs_of(model.double(), request.token_ids.tolist(), response.token_ids.tolist(), 1.0)
    model.float()
    found: npt.NDArray[np.float64] = np.abs(expected.numpy() - response.log_probs)
    return found


async def apart(engine: Any, version: int, *models: Any) -> list[float]:
    """How far the log-probs of six responses are from each model's, on average; their tokens have the version."""
    requests = [asked(number, version) for number in range(6)]
    responses = await engine.generate(requests)
    found = []
    for model in models:
        each = [differences(model, *pair) for pair in zip(requests, responses, strict=True)]
        found.append(float(np.concatenate(each).mean()))
    assert {span.version for response in responses for span in response.spans} == {version}
    largest = max(float(differences(models[0], *pair).max()) for pair in zip(requests, responses, strict=True))
    print(
        f"  version {version}: {', '.join(f'{value:.3f}' for value in found)} nats; at most {largest:.2f}", flush=True
    )
    assert largest < FAR
    return found


async def pushed(servers: Servers, engine: Any, rank: OneRank) -> int:
    version = servers.next_version()
    await engine.pause()
    report = await rank.push(engine, version)
    await engine.resume()
    where = "" if report.compared_with is None else f", compared with {report.compared_with}"
    print(f"  {report.bytes_sent} bytes in {report.seconds:.3f} s{where}", flush=True)
    return version


async def require_new_weights(servers: Servers, name: str, driver: Any, **options: Any) -> None:
    """Two versions, each compared after its push, if the transport can."""
    engine = servers.engines[name]
    plain = load_plain(servers.folder / "first", torch.float32)
    settings = {"update_weight_buffer_size": 1 << 20, "check_weight_update_equal": True} | options
    rank = OneRank(driver, servers.folder / f"{name}-{driver.__name__}", plain, **settings)
    try:
        for seed in (1, 2):
            old = load_plain(servers.folder / "first", torch.float32) if seed == 1 else plain
            moved(plain, seed=seed, scale=0.3)
            near, far = await apart(engine, await pushed(servers, engine, rank), plain, old)
            assert near < CLOSE
            assert seed == 2 or far > CLOSE
    finally:
        await asyncio.to_thread(rank.sender.close)


@pytest.mark.parametrize("driver", [Disk, Delta])
@on("tensor parallel")
def test_each_rank_takes_its_part_of_new_weights(driver: Any, servers: Servers) -> None:
    engine = servers.engines["tensor parallel"]
    servers.play(require_new_weights(servers, "tensor parallel", driver), "tensor parallel")
    assert engine.ranks_of_server == 2


@on("on the other GPU")
def test_weights_come_by_nccl(servers: Servers) -> None:
    scene = require_new_weights(servers, "on the other GPU", Distributed, device="cuda", colocated=False)
    servers.play(scene, "on the other GPU")


def sequences() -> list[npt.NDArray[np.int32]]:
    return list(np.random.default_rng(0).integers(2, 24, (4, 100)).astype(np.int32))


async def scores(engine: Any) -> npt.NDArray[np.float32]:
    """One sequence after the other: which ones share a batch decides the last bits."""
    return np.concatenate([await engine.score([sequence], [len(sequence) - 1]) for sequence in sequences()])


@on("float8", "float8 of the second")
def test_new_weights_are_rounded_as_those_of_a_start(servers: Servers) -> None:
    """vLLM quantizes what is sent. Afterwards the server is equal to one that started from the same weights."""

    async def scene() -> None:
        engine, started = servers.engines["float8"], servers.engines["float8 of the second"]
        before, required = await scores(engine), await scores(started)
        plain = load_plain(servers.folder / "second", torch.float32)
        rank = OneRank(
            Ipc,
            servers.folder / "float8",
            plain,
            device="cuda",
            update_weight_buffer_size=1 << 20,
            check_weight_update_equal=True,
        )
        try:
            version = await pushed(servers, engine, rank)
        finally:
            await asyncio.to_thread(rank.sender.close)
        after = await scores(engine)
        print(
            f"  float8: {np.abs(after - required).max():.6f} nats at most, before {np.abs(before - required).max():.2f}"
        )
        assert np.abs(before - required).max() > 1
        assert np.abs(after - required).max() < 1e-3
        await apart(engine, version, plain)

    servers.play(scene(), "float8", "float8 of the second")


async def accepted(engine: Any, version: int) -> float:
    """The share of drafts of greedy responses that were."""
    responses = await engine.generate([asked(number, version, temperature=0.0) for number in range(6)])
    rate = float(np.mean([response.extra["spec_accept_rate"] for response in responses]))
    length = float(np.mean([response.extra["spec_accept_length"] for response in responses]))
    print(f"  drafts accepted: {rate:.3f}, {length:.2f} tokens a step", flush=True)
    assert 1 <= length <= 4
    return rate


@on("n-grams")
def test_drafts_from_the_prompt_change_no_log_prob(servers: Servers) -> None:
    async def scene() -> None:
        engine = servers.engines["n-grams"]
        await require_new_weights(servers, "n-grams", Disk)
        assert 0 <= await accepted(engine, servers.next_version()) <= 1

    servers.play(scene(), "n-grams")


@on("drafts")
def test_a_draft_keeps_its_weights(servers: Servers) -> None:
    """It is the model itself, until the model gets new weights: log-probs are the model's all the time."""

    async def scene() -> None:
        engine = servers.engines["drafts"]
        plain = load_plain(servers.folder / "first", torch.float32)
        before = await accepted(engine, 0)
        rank = OneRank(Disk, servers.folder / "drafts", plain, update_weight_buffer_size=1 << 20)
        moved(plain, seed=1, scale=0.3)
        try:
            version = await pushed(servers, engine, rank)
        finally:
            await asyncio.to_thread(rank.sender.close)
        (near,) = await apart(engine, version, plain)
        assert near < CLOSE
        after = await accepted(engine, version)
        assert before > 0.8
        assert after < before - 0.3

    servers.play(scene(), "drafts")


async def require_new_adapter(servers: Servers, name: str, *, rounded: bool = False) -> None:
    """`rounded`: the weights beneath are in float8, which moves log-probs by more than bfloat16."""
    engine = servers.engines[name]
    base = load_plain(servers.folder / "first", torch.float32)
    targets = ["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"]
    trained = adapted(load_plain(servers.folder / "first", torch.float32), targets)
    rank = AdapterRank(servers.folder / f"{name}-adapter", trained)
    try:
        for seed in (1, 2):
            adapter_moved(trained, seed)
            near, far = await apart(engine, await pushed(servers, engine, rank), trained, base)
            assert near < (far / 2 if rounded else CLOSE)
            assert far > CLOSE
    finally:
        await asyncio.to_thread(rank.sender.close)


@on("adapter, tensor parallel")
def test_each_rank_takes_its_part_of_an_adapter(servers: Servers) -> None:
    servers.play(require_new_adapter(servers, "adapter, tensor parallel"), "adapter, tensor parallel")


@on("adapter, float8")
def test_an_adapter_lies_over_weights_in_float8(servers: Servers) -> None:
    servers.play(require_new_adapter(servers, "adapter, float8", rounded=True), "adapter, float8")


@on("adapter, images")
def test_an_adapter_of_a_model_with_images(servers: Servers) -> None:
    async def scene() -> None:
        engine, folder = servers.engines["adapter, images"], servers.folder / "vision"
        processor = ImageProcessor(folder)
        picture = noise(16, 24, 1)
        prompt = image_prompt(processor, 0, 9, picture, 12, 13)
        trained = adapted(load_plain_vision(folder, torch.float32), ["q_proj", "v_proj", "down_proj"])
        rank = AdapterRank(servers.folder / "images-adapter", trained)
        try:
            version = await pushed(servers, engine, rank)
        finally:
            await asyncio.to_thread(rank.sender.close)
        request = GenerateRequest(
            request_id="image",
            token_ids=prompt.token_ids,
            sampling=SamplingParams(max_new_tokens=24),
            seed=1,
            images=prompt.images,
        )
        (response,) = await engine.generate([request])
        assert {span.version for span in response.spans} == {version}
        found = []
        for model in (trained.double().base_model.model, load_plain_vision(folder)):
            with torch.no_grad():
                expected = image_log_probs_of(
                    with_stand_in(model),
                    [processor.pixels(picture)],
                    prompt.token_ids.tolist(),
                    response.token_ids.tolist(),
                )
            found.append(float(np.abs(expected.numpy() - response.log_probs).mean()))
        print(f"  images: {found[0]:.3f} nats, without the adapter {found[1]:.3f}")
        assert found[0] < CLOSE < found[1]

    servers.play(scene(), "adapter, images")


@on("replicas")
def test_requests_wait_inside_both_replicas(servers: Servers) -> None:
    """`retract`: what they have is computed again with the new weights."""

    async def scene() -> None:
        engine = servers.engines["replicas"]
        assert engine.ranks_of_server == 2
        plain = load_plain(servers.folder / "first", torch.float32)
        rank = OneRank(Disk, servers.folder / "replicas", plain, update_weight_buffer_size=1 << 20)
        moved(plain, seed=1, scale=0.1)
        try:
            first = await pushed(servers, engine, rank)
            # What is compiled at the first request would take longer than the requests below have.
            await apart(engine, first, plain)
            requests = [asked(number, first, max_new_tokens=LONG, min_new_tokens=LONG) for number in range(6)]
            running = asyncio.create_task(engine.generate(requests))
            await asyncio.sleep(1.0)
            moved(plain, seed=2, scale=0.1)
            second = await pushed(servers, engine, rank)
        finally:
            await asyncio.to_thread(rank.sender.close)
        for request, response in zip(requests, await running, strict=True):
            assert (response.finish_reason, len(response.token_ids)) == (FinishReason.LENGTH, LONG)
            assert [span.version for span in response.spans] == [first, second]
            of_second = differences(plain, request, response)[response.spans[1].start :]
            print(f"  {len(of_second)} tokens of the second version, {of_second.mean():.3f} nats")
            assert of_second.mean() < CLOSE

    servers.play(scene(), "replicas")


@on("asleep")
def test_two_servers_sleep_and_get_their_weights_again(servers: Servers) -> None:
    """Their weights are dropped. As the kernel calls it: everything, then the weights alone for an update, then the rest."""

    async def scene() -> None:
        engine = servers.engines["asleep"]
        plain = load_plain(servers.folder / "first", torch.float32)
        rank = OneRank(Disk, servers.folder / "asleep", plain, update_weight_buffer_size=1 << 20)
        free = [torch.cuda.mem_get_info(device)[0] for device in range(2)]
        await engine.pause()
        began = time.monotonic()
        await engine.sleep()
        freed = [torch.cuda.mem_get_info(device)[0] - before for device, before in enumerate(free)]
        print(f"  asleep after {time.monotonic() - began:.2f} s; MiB freed: {[size >> 20 for size in freed]}")
        await engine.wake_up([MemoryTag.WEIGHTS])
        moved(plain, seed=1, scale=0.3)
        version = servers.next_version()
        try:
            await rank.push(engine, version)
        finally:
            await asyncio.to_thread(rank.sender.close)
        await engine.wake_up([MemoryTag.KV_CACHE, MemoryTag.GRAPHS])
        await engine.resume()
        print(f"  awake with new weights after {time.monotonic() - began:.2f} s")
        (near,) = await apart(engine, version, plain)
        assert near < CLOSE
        assert min(freed) > 3 * 2**30

    servers.play(scene(), "asleep")
