"""The estimates of `Megatron.memory`, against real trainers, and against peaks that were measured on GPUs."""

import json
import multiprocessing
import subprocess
import sys
from concurrent.futures import ProcessPoolExecutor

import pytest
import torch
from families import make_family
from planned import planned

from slime_core.contracts.optimizer import OptimizerConfig
from slime_core.errors import ConfigError
from slime_megatron.plugin import Megatron
from slime_plugin_kit.tiny_training import WHOLE, Place, TrainingBatch, objective_of, opened
from slime_training.memory_plan import MemoryPhase, TrainerLoad, bytes_at, peak_of

pytestmark = pytest.mark.megatron

GIB = 2**30
ADAM = OptimizerConfig()
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
    "16 experts": {
        "model_type": "qwen3_moe", "vocab_size": 151936, "hidden_size": 1024, "num_hidden_layers": 16, "head_dim": 128,
        "num_attention_heads": 16, "num_key_value_heads": 4, "intermediate_size": 3072, "moe_intermediate_size": 768,
        "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True, "tie_word_embeddings": True,
    },
}  # fmt: skip
PARAMETERS = {"0.6B": 596_049_920, "4B": 4_022_468_096}
"""Numbers of the model cards."""
MOMENTS = {"exp_avg_dtype": "bf16", "exp_avg_sq_dtype": "bf16"}
HALF = MOMENTS | {"main_params_dtype": "bf16", "grad_reduce_in_fp32": False}
AGAIN = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}
TWENTY = {"recompute_granularity": "full", "recompute_method": "block", "recompute_num_layers": 20}

# GiB of torch.cuda.max_memory_allocated on H200s, by benchmarks/train_gpu.py and benchmarks/layouts_gpu.py:
# benchmarks/RESULTS.md, sections of 2026-11-22 and of 2026-11-23.
MEASURED = {
    "4B, 16k, all layers again, bf16 moments": ("4B", 16384, 1, 1, AGAIN | MOMENTS, 58.8),
    "4B, 16k, twenty layers again, bf16 moments": ("4B", 16384, 1, 1, TWENTY | MOMENTS, 86.5),
    "4B, 16k, all layers again": ("4B", 16384, 1, 1, AGAIN, 73.8),
    "4B, 64k, all layers again, bf16 moments": ("4B", 65536, 1, 1, AGAIN | MOMENTS, 74.5),
    "0.6B, 2 x 16k": ("0.6B", 16384, 2, 1, {}, 33.9),
    "0.6B, 2 x 16k, DP 2": ("0.6B", 16384, 2, 2, {}, 30.5),
    "0.6B, 2 x 16k, TP 2": (
        "0.6B", 16384, 2, 2, {"tensor_model_parallel_size": 2, "sequence_parallel": True}, 17.5,
    ),
    "0.6B, 2 x 16k, PP 2": ("0.6B", 16384, 2, 2, {"pipeline_model_parallel_size": 2}, 28.7),
    "0.6B, 2 x 16k, CP 2": ("0.6B", 8192, 2, 2, {"context_parallel_size": 2}, 21.6),
    # Of 2026-11-23, measured after this was written.
    "4B, 16k, all layers again, bf16 weights": ("4B", 16384, 1, 1, AGAIN | HALF, 36.4),
    "4B, 2 x 16k, DP 2": ("4B", 16384, 2, 2, TWENTY | MOMENTS, 71.5),
    "4B, 2 x 16k, TP 2": (
        "4B", 16384, 2, 2, TWENTY | MOMENTS | {"tensor_model_parallel_size": 2, "sequence_parallel": True}, 43.8,
    ),
    "4B, 2 x 16k, PP 2": ("4B", 16384, 2, 2, TWENTY | MOMENTS | {"pipeline_model_parallel_size": 2}, 34.3),
    "4B, 2 x 16k, CP 2": ("4B", 8192, 2, 2, TWENTY | MOMENTS | {"context_parallel_size": 2}, 58.1),
    "4B, 2 x 16k, nothing again": ("4B", 16384, 2, 1, MOMENTS, 121.0),
    "4B, 2 x 16k, nothing again, DP 2": ("4B", 16384, 2, 2, MOMENTS, 106.0),
    "4B, 2 x 16k, nothing again, TP 2": (
        "4B", 16384, 2, 2, MOMENTS | {"tensor_model_parallel_size": 2, "sequence_parallel": True}, 61.1,
    ),
    "4B, 2 x 16k, nothing again, CP 2": ("4B", 8192, 2, 2, MOMENTS | {"context_parallel_size": 2}, 77.9),
    "4B, 32k, nothing again, CP 2": ("4B", 16384, 1, 2, MOMENTS | {"context_parallel_size": 2}, 115.0),
    "4B, 8 x 16k, nothing again, PP 2": ("4B", 16384, 8, 2, MOMENTS | {"pipeline_model_parallel_size": 2}, 94.7),
    "16 experts, 4 x 16k": ("16 experts", 16384, 4, 1, {}, 29.6),
    "16 experts, 4 x 16k, EP 2": ("16 experts", 16384, 2, 2, {"expert_model_parallel_size": 2}, 23.5),
}  # fmt: skip


def question(folder, *, tokens=64, micros=1, options=None, **setup):
    """Arguments for `planned`."""
    setup = {"device": "cuda", "optimizer": ADAM} | setup
    world_size = setup.pop("world_size", 1)
    load = TrainerLoad(
        setup=Place(model=folder, world_size=world_size).setup(**setup),
        tokens=tokens,
        scored_tokens=tokens,
        num_micro_batches=micros,
    )
    return options or {}, load


@pytest.fixture(scope="module")
def apart():
    """A separate process: this one may be a rank of trainers that other test files have built."""
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        yield pool


@pytest.fixture(scope="module")
def estimated(apart):
    def ask(folder, **asked):
        return apart.submit(planned, *question(folder, **asked)).result()

    return ask


def of(memory, component):
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
def test_peaks_are_those_that_were_measured(case, shapes, estimated):
    shape, tokens, micros, world_size, options, measured = case
    memory = estimated(shapes[shape], tokens=tokens, micros=micros, world_size=world_size, options=options)
    assert peak_of(memory.lines)[1] / GIB == pytest.approx(measured, rel=0.1)


@pytest.mark.parametrize("shape", PARAMETERS)
def test_states_are_counted_from_the_released_number_of_parameters(shape, shapes, estimated):
    count, memory = PARAMETERS[shape], estimated(shapes[shape], options=MOMENTS)
    widths = {"weights": 2, "gradients": 4, "main weights": 4, "first moment": 2, "second moment": 2}
    assert {name: of(memory, name) for name in widths} == {name: width * count for name, width in widths.items()}


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    parent = tmp_path_factory.mktemp("models")
    return {family: make_family(parent / family, family) for family in ("qwen3", "qwen3-moe")}


def storages(tensors):
    """Bytes of the storages; shared ones count once."""
    return sum({tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes() for tensor in tensors}.values())


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bf16": True},
        {"bf16": True, "use_distributed_optimizer": True},
        {"bf16": True} | MOMENTS,
        {"bf16": True, "main_params_dtype": "bf16"} | MOMENTS,
    ],
)
@pytest.mark.parametrize("family", ["qwen3", "qwen3-moe"])
def test_bytes_are_those_of_a_trainer(family, options, models, estimated):
    with opened(Megatron.build(Megatron.Config(**options)), Place(model=models[family]), optimizer=ADAM) as one:
        one.backend.train_step(TrainingBatch.make().micros(WHOLE), objective_of())
        trainer = one.backend._trainer
        held = [parameter for chunk in trainer.bare for parameter in chunk.parameters()]
        buffers = [buffer for chunk in trainer.chunks for buffer in [*chunk.buffers, *chunk.expert_parallel_buffers]]
        parts = getattr(trainer.optimizer, "chained_optimizers", [trainer.optimizer])
        states = [(weight, state) for part in parts for weight, state in part.optimizer.state.items()]
        weights = storages(held)
        gradients = storages(buffer.grad_data for buffer in buffers)
        own = {parameter.untyped_storage().data_ptr() for parameter in held}
        main = storages(weight for weight, _ in states if weight.untyped_storage().data_ptr() not in own)
        moments = storages(state[name] for _, state in states for name in ("exp_avg", "exp_avg_sq"))
    memory = estimated(models[family], device="cpu", options=options)
    # Megatron pads the buffers that gradients are reduced in, and with it the weights that are in one.
    assert of(memory, "weights") == pytest.approx(weights, rel=0.02)
    assert of(memory, "gradients") == pytest.approx(gradients, rel=0.02)
    assert of(memory, "first moment") + of(memory, "second moment") == moments
    assert sum(line.num_bytes for line in memory.lines if line.component == "main weights") == main


@pytest.mark.parametrize(
    ("world_size", "options"),
    [
        (4, {"tensor_model_parallel_size": 2, "sequence_parallel": True, "expert_model_parallel_size": 2}),
        (4, {"pipeline_model_parallel_size": 2, "expert_model_parallel_size": 2}),
    ],
)
def test_ranks_hold_the_whole_model_together(world_size, options, models, estimated):
    """Experts once over the ranks of their group, everything else once over those of a replica, norms on each rank."""
    whole = of(estimated(models["qwen3-moe"], device="cpu"), "weights")
    part = of(estimated(models["qwen3-moe"], device="cpu", world_size=world_size, options=options), "weights")
    assert whole / world_size < part < whole * 0.75


def test_a_distributed_optimizer_shares_states_and_not_gradients(models, estimated):
    alone, shared = estimated(models["qwen3"]), estimated(models["qwen3"], world_size=4)
    assert of(shared, "gradients") == of(alone, "gradients")
    assert of(shared, "main weights") == pytest.approx(of(alone, "main weights") / 4, abs=4)


def test_offloaded_states_and_copies_are_on_the_host(models, estimated):
    memory = estimated(
        models["qwen3"], options={"optimizer_cpu_offload": True}, frozen_models={"reference": models["qwen3"]}
    )
    on_device = {line.component for line in memory.lines if line.place == "device"}
    assert not on_device & {"first moment", "second moment", "copy: reference"}
    assert bytes_at(memory.lines, MemoryPhase.IDLE, "host") > of(memory, "weights")


def test_the_fake_process_group_is_destroyed(models, estimated, apart):
    estimated(models["qwen3"], world_size=8, options={"pipeline_model_parallel_size": 2})
    assert not apart.submit(torch.distributed.is_initialized).result()


def test_a_rank_of_a_trainer_cannot_estimate(models):
    with (
        opened(Megatron.build(Megatron.Config()), Place(model=models["qwen3"]), optimizer=ADAM),
        pytest.raises(ConfigError, match="memory is estimated in a separate process"),
    ):
        planned(*question(models["qwen3"]))


def test_errors_of_megatron_are_reported(models, estimated):
    with pytest.raises(ConfigError, match=r"recompute_num_layers.*Given: backend\.recompute_granularity"):
        estimated(models["qwen3"], options={"recompute_granularity": "full", "recompute_method": "uniform"})


RUN = """\
name = "planned"
backend = "megatron"
engine = "local"
reward = "math"
algo = "grpo"
data = { prompt_data = "none.jsonl" }
rollout = { rollout_batch_size = 2, n_samples_per_prompt = 2, rollout_max_response_len = 4 }
train = { num_rollout = 1 }
launcher = { name = "ray" }
"""


def test_slime_plan_with_megatron(tmp_path, models):
    (tmp_path / "run.toml").write_text(RUN)
    command = [sys.executable, "-W", "ignore", "-c", "from slime_core.cli.main import main; main()", "plan", "run.toml"]
    flags = ["--hf-checkpoint", str(models["qwen3"]), "--tensor-model-parallel-size", "2"]
    words = [*command, *flags, "--device-memory", "80GiB", "--json"]
    done = subprocess.run(words, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    actor, _ = json.loads(done.stdout)["groups"]
    assert actor["roles"][0]["num_ranks"] == 2
    assert actor["fits"]
