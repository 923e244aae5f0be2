"""Tiny random models in temporary folders, samples of uneven lengths, micro-batches packed by hand."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import (
    LlamaConfig,
    LlamaForCausalLM,
    MiniMaxM2Config,
    MiniMaxM2ForCausalLM,
    MistralConfig,
    MistralForCausalLM,
    Qwen3_5ForCausalLM,
    Qwen3_5TextConfig,
    Qwen3Config,
    Qwen3ForCausalLM,
    Qwen3MoeConfig,
    Qwen3MoeForCausalLM,
    Qwen3NextConfig,
    Qwen3NextForCausalLM,
)

from slime_core.algorithm.packing import pack_micro_batch
from slime_core.contracts.backend import ObjectiveOutput
from slime_core.contracts.optimizer import OptimizerConfig, StepSettings
from slime_core.contracts.setup import TrainerSetup
from slime_core.types.batch import TokenColumns
from slime_core.types.microbatch import LossColumns, MicroBatch
from slime_fsdp.config import FsdpConfig
from slime_fsdp.plugin import Fsdp
from slime_models.media.image_processor import ImageProcessor
from slime_models.media.pack_images import PixelCache
from slime_plugin_kit.tiny_vision import image_batch, image_samples, make_tiny_vision_model
from slime_training.adapters.shape import AdapterShape

os.environ["HF_HUB_DISABLE_PROGRESS_BARS"] = "1"
transformers.logging.disable_progress_bar()
VOCAB = 37
SGD = {"optimizer": "sgd", "lr": 1.0, "weight_decay": 0.0, "clip_grad": 0.0}


def tiny(config_class, **options):
    return config_class(
        vocab_size=VOCAB,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        max_position_embeddings=64,
        **options,
    )


def build_models():
    return {
        "qwen3": lambda: Qwen3ForCausalLM(
            tiny(Qwen3Config, num_key_value_heads=2, head_dim=8, tie_word_embeddings=True)
        ),
        "llama": lambda: LlamaForCausalLM(tiny(LlamaConfig, num_key_value_heads=4, tie_word_embeddings=False)),
        "mistral": lambda: MistralForCausalLM(tiny(MistralConfig, num_key_value_heads=2, sliding_window=4)),
        "qwen3_moe": lambda: Qwen3MoeForCausalLM(
            tiny(
                Qwen3MoeConfig,
                num_key_value_heads=2,
                head_dim=8,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=16,
            )
        ),
        "qwen3_5_text": lambda: Qwen3_5ForCausalLM(
            tiny(
                Qwen3_5TextConfig,
                num_key_value_heads=2,
                head_dim=8,
                full_attention_interval=2,
                linear_key_head_dim=8,
                linear_value_head_dim=6,
                linear_num_key_heads=2,
                linear_num_value_heads=4,
            )
        ),
        "minimax_m2": lambda: MiniMaxM2ForCausalLM(
            tiny(
                MiniMaxM2Config,
                num_key_value_heads=2,
                head_dim=8,
                num_local_experts=4,
                num_experts_per_tok=2,
                rope_parameters={"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5},
            )
        ),
        "qwen3_next": lambda: Qwen3NextForCausalLM(
            tiny(
                Qwen3NextConfig,
                num_key_value_heads=2,
                head_dim=8,
                num_experts=4,
                num_experts_per_tok=2,
                moe_intermediate_size=16,
                shared_expert_intermediate_size=16,
                full_attention_interval=2,
                linear_key_head_dim=8,
                linear_value_head_dim=6,
                linear_num_key_heads=2,
                linear_num_value_heads=4,
            )
        ),
    }


def make_folder(family: str, folder: Path) -> Path:
    torch.manual_seed(7)
    model = build_models()[family]()
    with torch.no_grad():
        # Far from the symmetric start, so that a wrong attention or norm shows.
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.15)
    model.save_pretrained(folder)
    return folder


@dataclass(frozen=True)
class Sample:
    tokens: torch.Tensor
    prompt: int
    mask: torch.Tensor
    advantage: float
    weight: float
    """Weight of each trained token in the step's loss."""

    @property
    def response(self) -> int:
        return len(self.tokens) - self.prompt


def make_samples(count: int = 7) -> list[Sample]:
    """Samples of uneven lengths, with an empty response, a fully masked one and a prompt of one token."""
    return samples_of([(7, 5), (3, 0), (4, 9), (1, 6), (5, 1), (11, 14), (2, 3)][:count])


def target_step(backend):
    """Report and scores of a step of an adapter on prompts with 2, 3, 1 and 4 targets at each position."""
    backend.add_adapter("a", AdapterShape(rank=3, alpha=6), 7)
    backend.use_adapter("a")
    backend.predict_prompts(True)
    samples = samples_of([(5, 10), (1, 3), (6, 6), (3, 12)])
    report = backend.train_step([pack(samples[:3]), pack(samples[3:])], SequencePolicy(entropy_has_gradient=False))
    return report, backend.forward_only([pack(samples)], entropy=True)[0]


def samples_of(lengths: list[tuple[int, int]]) -> list[Sample]:
    """Prompts and responses of these lengths; the third response is masked."""
    generator = torch.Generator().manual_seed(3)
    samples, count = [], len(lengths)
    for i, (prompt, response) in enumerate(lengths):
        mask = torch.rand(response, generator=generator) < 0.8
        if i == 2:
            mask[:] = False
        samples.append(
            Sample(
                tokens=torch.randint(0, VOCAB, (prompt + response,), generator=generator),
                prompt=prompt,
                mask=mask,
                advantage=float(torch.randn((), generator=generator)),
                weight=1.0 / (count * max(int(mask.sum()), 1)),
            )
        )
    return samples


def pack(samples: list[Sample], temperature: float = 0.7) -> MicroBatch:
    if not samples:
        nothing = torch.zeros(0, dtype=torch.int64)
        return MicroBatch(
            tokens=torch.zeros(1, dtype=torch.int64),
            position_ids=torch.zeros(1, dtype=torch.int64),
            cu_seqlens=torch.tensor([0, 1], dtype=torch.int32),
            max_seqlen=1,
            logit_index=nothing,
            targets=nothing,
            segments=nothing,
            num_samples=0,
            mask=nothing.bool(),
            columns=LossColumns(advantages=nothing.float(), loss_weight=nothing.float()),
            temperature=temperature,
        )
    tokens, positions, offsets, index, segments = [], [], [0], [], []
    for i, sample in enumerate(samples):
        start = offsets[-1]
        tokens += sample.tokens.tolist()
        positions += range(len(sample.tokens))
        offsets.append(start + len(sample.tokens))
        index += range(start + sample.prompt - 1, start + len(sample.tokens) - 1)
        segments += [i] * sample.response
    mask = torch.cat([sample.mask for sample in samples])
    spread = torch.tensor(segments, dtype=torch.int64)
    weight = torch.tensor([sample.weight for sample in samples])[spread]
    return MicroBatch(
        tokens=torch.tensor(tokens),
        position_ids=torch.tensor(positions),
        cu_seqlens=torch.tensor(offsets, dtype=torch.int32),
        max_seqlen=max(len(sample.tokens) for sample in samples),
        logit_index=torch.tensor(index, dtype=torch.int64),
        targets=torch.tensor([tokens[p + 1] for p in index], dtype=torch.int64),
        segments=spread,
        num_samples=len(samples),
        mask=mask,
        columns=LossColumns(
            advantages=torch.tensor([sample.advantage for sample in samples])[spread],
            loss_weight=torch.where(mask, weight, 0.0),
        ),
        temperature=temperature,
    )


@dataclass(frozen=True)
class SequencePolicy:
    """-(advantage x exp(mean log-prob of the sequence) + log-prob) - 0.1 entropy, so that it needs Segments."""

    reads_values: bool = False
    needs_entropy: bool = True
    entropy_has_gradient: bool = True
    poison: float = 0.0
    calls: list[int] = field(default_factory=list)

    def __call__(self, micro, *, segments, log_probs=None, entropy=None, values=None):
        self.calls.append(len(micro.targets))
        weight = micro.columns.loss_weight
        if self.reads_values:
            token_loss = 0.5 * (values - micro.columns.advantages) ** 2
            entropy = values
        else:
            mask = micro.mask.float()
            count = segments.seq_sum(mask).clamp(min=1)
            likelihood = segments.expand((segments.seq_sum(log_probs * mask) / count).exp())
            token_loss = -(micro.columns.advantages * likelihood + log_probs)
            if self.entropy_has_gradient:
                token_loss = token_loss - 0.1 * entropy
        loss = (token_loss * weight).sum() + self.poison
        return ObjectiveOutput(loss=loss, sums={"loss": loss.detach(), "entropy": (entropy.detach() * weight).sum()})


def start(folder: Path, options: dict | None = None, optimizer: dict | None = None, **setup):
    """Returns a backend after its setup."""
    fields = {
        "role": "actor",
        "rank": 0,
        "world_size": 1,
        "local_rank": 0,
        "rendezvous": "",
        "device": "cpu",
        "model_path": folder,
        "optimizer": OptimizerConfig(**({"lr": 0.01} if optimizer is None else optimizer)),
        "total_steps": 20,
        "seed": 5,
    }
    backend = Fsdp.build(FsdpConfig(**(options or {})))
    backend.setup(TrainerSetup(**(fields | setup)))
    return backend


def weights_of(backend) -> dict[str, torch.Tensor]:
    """The weights that the backend exports; empty on every rank but the first."""
    return {name: tensor.clone() for layer in backend.export_weights() for name, tensor in (layer or {}).items()}


@pytest.fixture(scope="session")
def folders(tmp_path_factory):
    made = {}

    def folder(family: str) -> Path:
        if family not in made:
            made[family] = make_folder(family, tmp_path_factory.mktemp(family))
        return made[family]

    return folder


@pytest.fixture(scope="session")
def adapters(folders, tmp_path_factory):
    """Adapter folders in peft's format, with A and B far from zero."""
    made = {}

    def adapter(family: str) -> Path:
        if family not in made:
            torch.manual_seed(11)
            names = ["q_proj", "v_proj", "o_proj"] + ([] if family == "qwen3_moe" else ["up_proj", "down_proj"])
            config = LoraConfig(r=3, lora_alpha=6, target_modules=names, init_lora_weights=False)
            base = transformers.AutoModelForCausalLM.from_pretrained(folders(family))
            made[family] = tmp_path_factory.mktemp(f"{family}_adapter")
            get_peft_model(base, config).save_pretrained(made[family])
        return made[family]

    return adapter


@pytest.fixture
def samples():
    return make_samples()


@pytest.fixture(name="pack")
def pack_fixture():
    return pack


@pytest.fixture(name="start")
def start_fixture():
    """Like `start`, but closes the backend after the test: its process group would disturb the next test."""
    with contextlib.ExitStack() as stack:

        def started(*args, **setup):
            backend = start(*args, **setup)
            stack.callback(backend.close)
            return backend

        yield started


@pytest.fixture(name="weights_of")
def weights_of_fixture():
    return weights_of


def contents_of(folder: Path) -> dict[str, object]:
    """Every file, bit by bit; safetensors writes the keys of its header in another order each time."""
    found: dict[str, object] = {}
    for file in folder.rglob("*"):
        content = file.read_bytes() if file.is_file() else b""
        if file.suffix == ".safetensors":
            start = 8 + int.from_bytes(content[:8], "little")
            found[file.relative_to(folder).as_posix()] = json.loads(content[8:start]), content[start:]
        else:
            found[file.relative_to(folder).as_posix()] = content
    return found


@pytest.fixture
def contents():
    return contents_of


@pytest.fixture
def sequence_policy():
    return SequencePolicy


@pytest.fixture
def train(samples):
    """`train(backend, count, first=0)`: `count` steps, alternately of two micro-batches and of one."""

    def steps(backend, count, first=0):
        micros = [[pack(samples[:4]), pack(samples[4:])], [pack(samples[::-1])]]
        return [backend.train_step(micros[i % 2], SequencePolicy()) for i in range(first, first + count)]

    return steps


@pytest.fixture
def sgd():
    return SGD


@pytest.fixture(scope="session")
def one_step(folders):
    """One plain step on one rank: report, weights before and after, scores before and after."""
    backend = start(folders("qwen3"), None, SGD)
    micro = pack(make_samples())
    (score_before,) = backend.forward_only([micro], entropy=True)
    before = weights_of(backend)
    report = backend.train_step([micro], SequencePolicy())
    (score_after,) = backend.forward_only([micro])
    return report, before, weights_of(backend), score_before, score_after


@pytest.fixture(scope="session")
def one_held(folders):
    """Adapter `a` as two_ranks.py trains it: the second report, its log-probs, and those of the base."""
    samples, backend = make_samples(), start(folders("qwen3"), {"max_adapters": 1})
    backend.add_adapter("a", AdapterShape(rank=3, alpha=6), 7)
    backend.use_adapter("a")
    for _ in range(2):
        backend.forward_backward([pack(samples[:3]), pack(samples[3:5]), pack(samples[5:])], SequencePolicy())
        report = backend.optim_step(StepSettings(lr=0.02, clip_grad=0.3))
    log_probs = backend.forward_only([pack(samples)])[0].log_probs
    backend.use_adapter(None)
    return report, log_probs, backend.forward_only([pack(samples)])[0].log_probs


@pytest.fixture(scope="session")
def one_target_step(folders):
    return target_step(start(folders("qwen3"), {"max_adapters": 1, "log_probs_chunk_size": 3}))


@dataclass(frozen=True)
class TwoRanks:
    """The results that each of two ranks saved."""

    folder: Path

    def __call__(self, name: str) -> list[dict]:
        """Yields the results of each rank."""
        parts = [torch.load(self.folder / f"{name}.{rank}.pt", weights_only=True) for rank in range(2)]
        return [
            {key: value.numpy() if isinstance(value, torch.Tensor) else value for key, value in part.items()}
            for part in parts
        ]


def pack_images(folder: Path, *parts: list[int]) -> list[MicroBatch]:
    """Returns one micro-batch for each list of samples."""
    processor = ImageProcessor(folder)
    batch, cache = image_batch(image_samples(processor)), PixelCache(lambda: processor)
    ones = np.ones(len(batch.mask), np.float32)
    columns = TokenColumns(advantages=ones, old_log_probs=-ones, loss_weight=batch.mask / np.float32(8))
    return [pack_micro_batch(batch, np.array(part), columns=columns, pixels=cache) for part in parts]


@pytest.fixture(scope="session")
def one_vision_step():
    """Runs on one rank the step on the image micro-batches of two_ranks.py."""

    def step(folder):
        micros = pack_images(folder, [5, 6, 1], [7])
        backend = start(folder, {}, SGD)
        scores, before = backend.forward_only(micros), weights_of(backend)
        report = backend.train_step(micros, SequencePolicy())
        after = weights_of(backend)
        backend.close()
        return report, before, after, scores

    return step


@pytest.fixture(scope="session")
def run_two_ranks(folders, adapters, tmp_path_factory):
    def run(device: str) -> TwoRanks:
        out = tmp_path_factory.mktemp(f"{device}_ranks")
        broken = shutil.copytree(folders("qwen3"), out / "broken")
        weights = broken / "model.safetensors"
        weights.write_bytes(weights.read_bytes()[:2000])
        transformers.AutoModelForCausalLM.from_pretrained(folders("qwen3"), dtype=torch.bfloat16).save_pretrained(
            out / "half"
        )
        make_tiny_vision_model(out / "vision")
        script = Path(__file__).with_name("two_ranks.py")
        arguments = [device, str(out), str(folders("qwen3")), str(folders("mistral")), str(adapters("qwen3"))]
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        done = subprocess.run(
            [sys.executable, str(script), *arguments], env=environment, capture_output=True, text=True, timeout=240
        )
        assert done.returncode == 0, (done.stdout + done.stderr)[-6000:]
        return TwoRanks(out)

    return run


class Oracle:
    """Reference: transformers, in float64, one padded batch."""

    def __init__(self, folder: Path, adapter: Path | None = None) -> None:
        self.model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float64, experts_implementation="eager"
        ).eval()
        if adapter is not None:
            self.model = PeftModel.from_pretrained(self.model, adapter, is_trainable=True).double().eval()

    def __call__(self, samples, temperature: float = 0.7):
        """Log-probs and entropies of each response, a list of (R,) each."""
        longest = max(len(sample.tokens) for sample in samples)
        ids = torch.stack([torch.nn.functional.pad(s.tokens, (0, longest - len(s.tokens))) for s in samples])
        attend = torch.stack([(torch.arange(longest) < len(s.tokens)).long() for s in samples])
        logits = self.model(input_ids=ids, attention_mask=attend, use_cache=False).logits / temperature
        log_p = logits.log_softmax(-1)
        log_probs, entropies = [], []
        for row, sample in zip(log_p, samples, strict=True):
            part = row[sample.prompt - 1 : len(sample.tokens) - 1]
            log_probs.append(part[torch.arange(sample.response), sample.tokens[sample.prompt :]])
            entropies.append(-(part.exp() * part).sum(-1))
        return log_probs, entropies

    def loss(self, samples, temperature: float = 0.7):
        log_probs, entropies = self(samples, temperature)
        loss = torch.zeros((), dtype=torch.float64)
        for sample, log_prob, entropy in zip(samples, log_probs, entropies, strict=True):
            if sample.mask.any():
                likelihood = log_prob[sample.mask].mean().exp()
                token = -(sample.advantage * likelihood + log_prob) - 0.1 * entropy
                loss = loss + sample.weight * token[sample.mask].sum()
        return loss

    def gradients(self, samples):
        """Gradients of the weights in safetensors files, by name."""
        self.model.zero_grad()
        self.loss(samples).backward()
        return {name: parameter.grad for name, parameter in self.model.named_parameters()}


@pytest.fixture
def oracle(folders):
    return lambda family, adapter=None: Oracle(family if isinstance(family, Path) else folders(family), adapter)
