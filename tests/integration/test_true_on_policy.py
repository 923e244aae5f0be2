"""True on-policy: the engine's log-prob of a token that it decoded equals the trainer's, to the bit."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import Starcoder2Config, Starcoder2ForCausalLM

from slime_core.algorithm.packing import pack_micro_batch
from slime_core.contracts.backend import TrainBackend
from slime_core.contracts.engine import Capability
from slime_core.contracts.setup import EngineSetup
from slime_core.types.batch import Batch
from slime_core.types.completion import Completion, GenerateRequest, SamplingParams
from slime_fsdp.config import FsdpConfig
from slime_fsdp.plugin import Fsdp
from slime_local.config import LocalConfig
from slime_local.engine import LocalEngine
from slime_local.plugin import Local
from slime_plugin_kit.tiny_model import buckets_of as buckets_of_weights
from slime_plugin_kit.tiny_model import load_plain, make_tiny_model, moved, named_weights
from slime_plugin_kit.tiny_training import MASKED, TEMPERATURE, Place, TrainingBatch, objective_of, opened

LENGTHS = (4, 4, 4, 7, 7, 1, 41, 41)
"""Of the prompts; equal neighbours are the same."""
BUDGETS = (5, 33, 1, 0, 12, 40, 8, 13)
WHOLE = (tuple(range(len(LENGTHS))),)
SPLITS = (((0, 1), (2,), (3, 4, 5), (6, 7)), ((7, 0, 5), (), (3,), (6, 2, 1, 4)))


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


def requests() -> list[GenerateRequest]:
    """None ends before its budget: the tiny model has no stop token among those that it may sample."""
    rng = np.random.default_rng(4)
    prompt, made = np.empty(0, np.int32), []
    for number, (length, budget) in enumerate(zip(LENGTHS, BUDGETS, strict=True)):
        if length != len(prompt):
            prompt = rng.integers(2, 20, length).astype(np.int32)
        sampling = SamplingParams(max_new_tokens=budget, min_new_tokens=budget, temperature=TEMPERATURE)
        made.append(GenerateRequest(request_id=f"r{number}", token_ids=prompt, sampling=sampling, seed=number))
    return made


@dataclass
class Fed:
    """Counts the tokens that an engine's model reads, padding left out."""

    tokens: int = 0
    positions: int = 0


@contextmanager
def counted(engine: LocalEngine) -> Iterator[Fed]:
    fed, network = Fed(), engine._model.network
    plain = network.forward

    def forward(**inputs: torch.Tensor) -> object:
        mask = inputs.get("attention_mask")
        width = inputs["input_ids"].shape[1]
        fed.positions += inputs["input_ids"].numel()
        # A prompt's rows see themselves and what is before them; padded rows see themselves alone.
        if mask is None or mask.dtype != torch.bool:
            fed.tokens += inputs["input_ids"].numel()
        else:
            fed.tokens += int(mask[:, 0, -1].numpy().sum())
        assert width == 1 or mask is None or mask.shape[-1] == width
        return plain(**inputs)

    network.forward = forward
    try:
        yield fed
    finally:
        network.forward = plain


@dataclass(frozen=True)
class Rollout:
    completions: list[Completion]
    fed: Fed


def generate(model: Path, waves: Sequence[Sequence[GenerateRequest]], *, on: bool = True, **options: object) -> Rollout:
    """The responses of all waves, one wave after the other."""

    async def scene() -> Rollout:
        engine = Local.build(LocalConfig(**options))
        info = await engine.start(
            EngineSetup(
                index=0,
                model_path=model,
                device="cpu",
                seed=0,
                max_context_len=600,
                max_batch=64,
                run_dir=model.parent,
                true_on_policy=on,
            )
        )
        assert (Capability.TRUE_ON_POLICY in info.capabilities) is on
        with counted(engine) as fed:
            completions = [completion for wave in waves for completion in await engine.generate(wave)]
        await engine.stop()
        return Rollout(completions, fed)

    return asyncio.run(scene())


def batch_of(asked: Sequence[GenerateRequest], completions: Sequence[Completion]) -> Batch:
    responses = [completion.token_ids for completion in completions]
    lengths = np.array([len(response) for response in responses], np.int32)
    numbers = np.arange(len(asked), dtype=np.int64)
    mask = np.ones(lengths.sum(), np.uint8)
    mask[np.repeat(numbers, lengths) == MASKED + 1] = 0
    tokens = [part for one, two in zip(asked, responses, strict=True) for part in (one.token_ids, two)]
    return Batch(
        index=numbers,
        group_index=numbers,
        rollout_id=numbers,
        credit_key=numbers,
        reward=np.ones(len(asked)),
        truncated=np.zeros(len(asked), np.bool_),
        prompt_length=np.array([len(one.token_ids) for one in asked], np.int32),
        response_length=lengths,
        tokens=np.concatenate(tokens).astype(np.int32),
        mask=mask,
        rollout_log_probs=np.concatenate([completion.log_probs for completion in completions]),
        version=np.zeros(lengths.sum(), np.int32),
    )


def trainer_of(model: Path, *, on: bool = True, **options: object) -> TrainBackend:
    backend = Fsdp.build(FsdpConfig(**options))
    backend.setup(Place(model=model).setup(true_on_policy=on))
    return backend


def scores(backend: TrainBackend, batch: Batch, split: Sequence[Sequence[int]]) -> np.ndarray:
    """(M,)"""
    column = np.full(len(batch.mask), np.nan, np.float32)
    groups = [np.array(samples, np.int64) for samples in split]
    micros = [pack_micro_batch(batch, samples, temperature=TEMPERATURE) for samples in groups]
    for samples, of_micro in zip(groups, backend.forward_only(micros), strict=True):
        assert of_micro.log_probs is not None
        column[batch.response_rows(samples)] = of_micro.log_probs
    return column


def bits(values: np.ndarray) -> list[int]:
    assert values.dtype == np.float32
    return values.view(np.int32).tolist()


@pytest.fixture(scope="module")
def rollout(model: Path) -> Rollout:
    return generate(model, [requests()])


@pytest.fixture(scope="module")
def batch(rollout: Rollout) -> Batch:
    return batch_of(requests(), rollout.completions)


@pytest.fixture(scope="module")
def trainer(model: Path) -> Iterator[TrainBackend]:
    backend = trainer_of(model)
    yield backend
    backend.close()


@pytest.mark.bits
def test_the_log_probs_are_those_of_the_decoding_pass(rollout: Rollout) -> None:
    """Each token of each distinct prompt is read once, each response's but for its last is fed once: nothing a second time."""
    distinct = {
        request.token_ids.tobytes(): len(request.token_ids) for request in requests() if request.sampling.max_new_tokens
    }
    assert [len(completion.token_ids) for completion in rollout.completions] == list(BUDGETS)
    assert rollout.fed.tokens == sum(distinct.values()) + sum(budget - 1 for budget in BUDGETS if budget)


@pytest.mark.bits
@pytest.mark.parametrize("split", [WHOLE, *SPLITS])
def test_equal_in_every_packing(trainer: TrainBackend, batch: Batch, split: Sequence[Sequence[int]]) -> None:
    assert len(batch.mask) == sum(BUDGETS)
    assert bits(scores(trainer, batch, split)) == bits(batch.rollout_log_probs)


@pytest.mark.bits
@pytest.mark.parametrize("options", [{"share_prompts": False}, {"log_probs_chunk_size": 3}])
def test_equal_whatever_the_trainer_shares_or_cuts(model: Path, batch: Batch, options: dict[str, object]) -> None:
    backend = trainer_of(model, **options)
    assert bits(scores(backend, batch, SPLITS[0])) == bits(batch.rollout_log_probs)
    backend.close()


@pytest.mark.bits
def test_equal_on_several_threads(trainer: TrainBackend, batch: Batch) -> None:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        assert bits(scores(trainer, batch, WHOLE)) == bits(batch.rollout_log_probs)
    finally:
        torch.set_num_threads(before)


@pytest.mark.bits
@pytest.mark.parametrize(
    ("waves", "options"),
    [
        pytest.param([[n] for n in (6, 1, 7, 0, 5, 2, 4, 3)], {}, id="one at a time"),
        pytest.param([[7, 6, 5, 4, 3, 2, 1, 0]], {"max_running": 2}, id="two running, others come in"),
        pytest.param([[0, 3, 5], [1, 2, 4, 6, 7]], {"max_prefill_tokens": 8}, id="prompts apart"),
    ],
)
def test_responses_do_not_depend_on_other_requests(
    model: Path, rollout: Rollout, waves: Sequence[Sequence[int]], options: dict[str, object]
) -> None:
    asked = requests()
    other = generate(model, [[asked[n] for n in wave] for wave in waves], **options).completions
    for n, completion in zip((n for wave in waves for n in wave), other, strict=True):
        assert completion.token_ids.tolist() == rollout.completions[n].token_ids.tolist()
        assert bits(completion.log_probs) == bits(rollout.completions[n].log_probs)


@pytest.mark.bits
def test_an_aborted_response_continues_with_the_same_bits(model: Path, rollout: Rollout) -> None:
    """The tokens that were decoded one by one are then read in one prefill."""
    whole, kept = rollout.completions[5], 17
    asked = requests()[5]
    tokens = np.concatenate([asked.token_ids, whole.token_ids[:kept]])
    budget = BUDGETS[5] - kept
    sampling = replace(asked.sampling, max_new_tokens=budget, min_new_tokens=budget)
    (rest,) = generate(model, [[replace(asked, token_ids=tokens, sampling=sampling)]]).completions
    assert rest.token_ids.tolist() == whole.token_ids[kept:].tolist()
    assert bits(rest.log_probs) == bits(whole.log_probs[kept:])


@pytest.mark.bits
def test_equal_after_new_weights(model: Path, tmp_path: Path) -> None:
    """The weights come from the trainer's export, and keys and values are recomputed in the middle of a response."""
    weights = named_weights(moved(load_plain(model, torch.float32), 1))
    asked = requests()[6:]

    async def scene() -> list[Completion]:
        engine = Local.build(LocalConfig())
        await engine.start(
            EngineSetup(
                index=0,
                model_path=model,
                device="cpu",
                seed=0,
                max_context_len=600,
                max_batch=8,
                run_dir=tmp_path,
                true_on_policy=True,
            )
        )
        running = asyncio.ensure_future(engine.generate(asked))
        for _ in range(8):
            await asyncio.sleep(0)
        await engine.pause()
        for bucket in buckets_of_weights(weights, version=1, count=2):
            await engine.load_bucket(bucket)
        await engine.resume()
        completions = await running
        await engine.stop()
        return completions

    completions = asyncio.run(scene())
    new = [next(span for span in completion.spans if span.version == 1) for completion in completions]
    assert all(0 < span.start < span.end for span in new)
    batch = batch_of(asked, completions)
    backend = trainer_of(model)
    with torch.no_grad():
        for name, parameter in backend._ready.model.model.named_parameters():
            parameter.copy_(weights[name])
    found = scores(backend, batch, ((0, 1),))
    backend.close()
    starts = np.concatenate([[0], np.cumsum(batch.response_length)])
    for span, start in zip(new, starts[:-1], strict=True):
        rows = slice(start + span.start, start + span.end)
        assert bits(found[rows]) == bits(batch.rollout_log_probs[rows])


def test_without_it_they_differ_by_rounding(model: Path) -> None:
    completions = generate(model, [requests()], on=False).completions
    batch = batch_of(requests(), completions)
    backend = trainer_of(model, on=False)
    apart = np.abs(scores(backend, batch, WHOLE) - batch.rollout_log_probs)
    backend.close()
    assert 0 < apart.max() < 1e-4


@pytest.mark.bits
def test_bfloat16_engine_and_trainer(model: Path) -> None:
    completions = generate(model, [requests()], dtype="bfloat16").completions
    batch = batch_of(requests(), completions)
    backend = trainer_of(model, precision="bfloat16")
    assert bits(scores(backend, batch, SPLITS[0])) == bits(batch.rollout_log_probs)
    backend.close()


@pytest.mark.bits
def test_a_model_with_biases_layer_norms_and_a_window(model: Path, tmp_path: Path) -> None:
    config = Starcoder2Config(
        vocab_size=25, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=128, sliding_window=6, initializer_range=0.3,
        bos_token_id=0, eos_token_id=1,
    )  # fmt: skip
    torch.manual_seed(3)
    network = Starcoder2ForCausalLM(config)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter += 0.1 * torch.randn_like(parameter)
    network.save_pretrained(tmp_path)
    for file in model.glob("token*"):
        shutil.copy(file, tmp_path)
    batch = batch_of(requests(), generate(tmp_path, [requests()]).completions)
    backend = trainer_of(tmp_path)
    assert bits(scores(backend, batch, SPLITS[1])) == bits(batch.rollout_log_probs)
    backend.close()


@pytest.mark.parametrize("checkpointing", [False, True])
def test_gradients_are_those_of_transformers(model: Path, checkpointing: bool) -> None:
    training = TrainingBatch.make()
    expected = training.gradients_by_transformers(load_plain(model))
    backend = Fsdp.build(FsdpConfig(gradient_checkpointing=checkpointing))
    with opened(backend, Place(model=model), true_on_policy=True) as trainer:
        before = trainer.weights()
        report = backend.train_step(training.micros(SPLITS[0]), objective_of())
        after = trainer.weights()
    assert np.isfinite(report.grad_norm)
    for name, gradient in expected.items():
        taken = (before[name] - after[name]).double()
        assert torch.allclose(taken, gradient, rtol=1e-4, atol=2e-6 * float(gradient.abs().max()) + 1e-7), name
