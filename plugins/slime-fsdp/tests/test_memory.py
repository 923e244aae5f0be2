"""The estimates of `Fsdp.memory`, against real trainers, and against peaks that were measured on GPUs."""

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.testing._internal.distributed.fake_pg import FakeStore
from transformers import AutoConfig, AutoModelForCausalLM

from slime_core.contracts.optimizer import OptimizerConfig
from slime_core.contracts.setup import TrainerSetup
from slime_fsdp.config import FsdpConfig
from slime_fsdp.plugin import Fsdp
from slime_training.footprint import DecoderShape, kept_per_token
from slime_training.memory_plan import MemoryPhase, TrainerLoad, bytes_at, peak_of

GIB = 2**30
QWEN3 = {
    "model_type": "qwen3",
    "vocab_size": 151936,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "tie_word_embeddings": True,
}
SHAPES = {
    "0.6B": QWEN3
    | {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072},
    "4B": QWEN3 | {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 9728},
}
PARAMETERS = {"0.6B": 596_049_920, "4B": 4_022_468_096}
"""Numbers of the model cards, which count the embedding and a tied head once."""
ROUNDED = {"main_params_dtype": "bf16", "exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
COMPILE, AGAIN, HALVES = {"compile": True}, {"gradient_checkpointing": True}, {"context_parallel_size": 2}

# GiB of torch.cuda.max_memory_allocated, by benchmarks/train_gpu.py on one H200: benchmarks/RESULTS.md, the sections of
# 2026-11-22 (4B) and of 2026-11-21 (0.6B).
MEASURED = {
    "4B, 16k, compile, bf16 states": ("4B", 16384, 1, 1, COMPILE | ROUNDED, 86.5),
    "4B, 16k, compile, checkpointing, bf16 states": ("4B", 16384, 1, 1, COMPILE | AGAIN | ROUNDED, 33.8),
    "4B, 16k, compile, checkpointing": ("4B", 16384, 1, 1, COMPILE | AGAIN, 63.2),
    "4B, 64k, compile, checkpointing, bf16 states": ("4B", 65536, 1, 1, COMPILE | AGAIN | ROUNDED, 43.7),
    "4B, 2 x 16k, compile, bf16 states": ("4B", 16384, 2, 1, COMPILE | ROUNDED, 101.5),
    "the same, DP 2": ("4B", 16384, 1, 2, COMPILE | ROUNDED, 75.4),
    "the same, CP 2": ("4B", 8192, 2, 2, COMPILE | ROUNDED | HALVES, 56.5),
    "4B, 64k, compile, checkpointing, bf16 states, CP 2": ("4B", 32768, 1, 2, COMPILE | AGAIN | ROUNDED | HALVES, 23.5),
    "0.6B, 2 x 16k": ("0.6B", 16384, 2, 1, {}, 43.9),
    "0.6B, 2 x 16k, checkpointing": ("0.6B", 16384, 2, 1, AGAIN, 12.4),
    "0.6B, 2 x 16k, compile": ("0.6B", 16384, 2, 1, COMPILE, 32.6),
}


def load_of(folder: Path, *, tokens: int = 64, micros: int = 1, **setup) -> TrainerLoad:
    fields = {
        "role": "actor",
        "rank": 0,
        "world_size": 1,
        "local_rank": 0,
        "rendezvous": "",
        "device": "cuda",
        "model_path": folder,
        "optimizer": OptimizerConfig(),
        "total_steps": 1,
        "seed": 0,
    }
    return TrainerLoad(
        setup=TrainerSetup(**(fields | setup)), tokens=tokens, scored_tokens=tokens, num_micro_batches=micros
    )


def estimated(load: TrainerLoad, **options):
    return Fsdp.memory(FsdpConfig(**options), load)


def of(memory, component: str) -> int:
    (line,) = (line for line in memory.lines if line.component == component)
    return line.num_bytes


@pytest.fixture(scope="module")
def shapes(tmp_path_factory):
    """Folders with only a config.json."""
    made = {}
    for name, config in SHAPES.items():
        made[name] = tmp_path_factory.mktemp(name)
        (made[name] / "config.json").write_text(json.dumps(config))
    return made


@pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in MEASURED.items()])
def test_peaks_are_those_that_were_measured(case, shapes):
    shape, tokens, micros, world_size, options, measured = case
    load = load_of(shapes[shape], tokens=tokens, micros=micros, world_size=world_size)
    _, peak = peak_of(estimated(load, **options).lines)
    # The older runs, of 0.6B, repeated keys for attention.
    assert peak / GIB == pytest.approx(measured, rel=0.02 if shape == "4B" else 0.1)


@pytest.mark.parametrize("shape", SHAPES)
def test_states_are_counted_from_the_released_number_of_parameters(shape, shapes):
    count = PARAMETERS[shape]
    plain, rounded = estimated(load_of(shapes[shape])), estimated(load_of(shapes[shape]), **ROUNDED)
    for component in ("weights", "gradients", "first moment", "second moment"):
        assert of(plain, component) == 4 * count
        assert of(rounded, component) == 2 * count


def test_the_base_of_adapters_stays_in_the_files_own_bfloat16(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(SHAPES["0.6B"] | {"dtype": "bfloat16"}))
    memory = estimated(load_of(tmp_path), lora_rank=4)
    # Adapters are float32, and only they have gradients.
    assert of(memory, "weights") == 2 * PARAMETERS["0.6B"] + of(memory, "gradients")


class Counted:
    """Bytes of storage that the optimizer sees at its step, by component. Gradients that share storage count once."""

    def __call__(self, optimizer, *_):
        trained = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        self.weights = stored(trained)
        self.gradients = stored(parameter.grad for parameter in trained)
        moments = [optimizer.state[parameter] for parameter in trained]
        self.moments = stored(state[name] for state in moments for name in ("exp_avg", "exp_avg_sq"))


def stored(tensors) -> int:
    storages = [getattr(tensor, "_local_tensor", tensor).untyped_storage() for tensor in tensors]
    return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"precision": "bfloat16"},
        {"precision": "bfloat16"} | ROUNDED,
        {"exp_avg_dtype": "bf16"},
        {"lora_rank": 3},
        {"freeze_params_name_list": ("embed_tokens",)},
    ],
)
@pytest.mark.parametrize("family", ["qwen3", "llama", "qwen3_moe"])
def test_bytes_of_states_are_those_of_a_trainer(family, options, folders, start, pack, samples, sequence_policy):
    backend, counted = start(folders(family), options), Counted()
    handle = register_optimizer_step_post_hook(counted)
    try:
        backend.train_step([pack(samples)], sequence_policy())
    finally:
        handle.remove()
        backend.close()
    memory = estimated(load_of(folders(family), device="cpu"), **options)
    assert of(memory, "gradients") == counted.gradients
    assert of(memory, "first moment") + of(memory, "second moment") == counted.moments
    if not {"lora_rank", "freeze_params_name_list"} & set(options):
        assert of(memory, "weights") == counted.weights


def test_a_base_of_adapters_has_weights_alone(folders):
    memory = estimated(load_of(folders("qwen3")), max_adapters=2)
    for component in ("gradients", "first moment", "second moment"):
        assert of(memory, component) == 0
    assert of(memory, "weights") > 0
    assert any("adapters, whose ranks" in part for part in memory.not_estimated)


def test_a_copy_of_another_model_is_counted_as_that_one(folders):
    memory = estimated(load_of(folders("qwen3"), device="cpu", frozen_models={"teacher": folders("llama")}))
    whole = AutoModelForCausalLM.from_pretrained(folders("llama"))
    assert of(memory, "copy: teacher") == sum(parameter.nbytes for parameter in whole.parameters())


@pytest.mark.parametrize("ranks", [2, 3, 5])
def test_shards_are_those_of_fsdp(ranks, folders):
    """The first rank has the most, for models whose sizes do not divide."""
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
    try:
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folders("qwen3")), dtype=torch.float32)
        fully_shard(model, mesh=init_device_mesh("cpu", (ranks,)))
        elements = sum(parameter.to_local().numel() for parameter in model.parameters())
    finally:
        torch.distributed.destroy_process_group()
    assert of(estimated(load_of(folders("qwen3"), device="cpu", world_size=ranks)), "weights") == 4 * elements


class Saved:
    """Storages that autograd keeps, each once; weights and views of them are not counted."""

    def __init__(self, model):
        self.held = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self.tensors = {}

    def __call__(self, tensor):
        if (place := tensor.untyped_storage().data_ptr()) not in self.held:
            # Kept alive: otherwise another storage could later have its address.
            self.tensors[place] = tensor
        return tensor

    @property
    def num_bytes(self) -> int:
        return sum(tensor.untyped_storage().nbytes() for tensor in self.tensors.values())


@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize("family", ["qwen3", "llama"])
def test_activations_are_what_autograd_keeps(family, precision):
    """For transformers' own layers. One number per head and token is not counted, which is small for the head width of real
    models."""
    sizes = {"vocab_size": 37, "hidden_size": 256, "intermediate_size": 768, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64}
    config = AutoConfig.for_model(family, **sizes, **heads)
    dtype = getattr(torch, precision)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").model

    def saved_with(layers):
        model.config.num_hidden_layers = layers
        found = Saved(model)
        with torch.autograd.graph.saved_tensors_hooks(found, lambda tensor: tensor):
            model(input_ids=torch.zeros((1, 128), dtype=torch.int64), use_cache=False)
        return found.num_bytes

    of_layer = (saved_with(2) - saved_with(1)) / 128
    shape = DecoderShape.of(config.to_dict(), normed=family == "qwen3")
    counted = kept_per_token(shape, element=dtype.itemsize, fused=False).whole
    assert counted == pytest.approx(of_layer, rel=0.02)


def test_sgd_has_no_moments_and_a_value_head_no_logits(folders):
    memory = estimated(load_of(folders("qwen3"), head="value", optimizer=OptimizerConfig(optimizer="sgd")))
    components = {line.component for line in memory.lines}
    assert "first moment" not in components
    assert "head in chunks" not in components


def test_offloaded_states_are_on_the_host(folders):
    memory = estimated(load_of(folders("qwen3")), fsdp_cpu_offload=True)
    assert bytes_at(memory.lines, MemoryPhase.IDLE) == 0
    assert bytes_at(memory.lines, MemoryPhase.IDLE, "host") == of(memory, "weights") * 3


def test_uncounted_layers_are_listed_as_not_estimated(folders):
    memory = estimated(load_of(folders("qwen3_next")))
    assert memory.not_estimated == ("activations: not counted for layers of linear attention",)
    assert not any(line.component == "activations" for line in memory.lines)
