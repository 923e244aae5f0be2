"""Options of the FSDP backend: their checks, and the layout that they set. Nothing heavy is imported here."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, Literal

from pydantic import Field

from slime_core.contracts.backend import Layout
from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.optimizer import OptimizerDriver
from slime_core.contracts.paths import RunPath
from slime_core.errors import ModelError
from slime_fsdp.supported_models import WITH_IMAGES, WITH_LINEAR_ATTENTION, model_problems

EXPERTS: Final = ("num_experts", "num_local_experts", "n_routed_experts")
"""Keys of a config.json with the number of experts."""
StoredDtype = Literal["fp32", "bf16"]


class FsdpConfig(DriverConfig):
    """Options of the FSDP backend."""

    context_parallel_size: int = Field(1, gt=0)
    """Ranks that share the tokens of each sequence (zigzag); the number of ranks must divide by it."""
    precision: Literal["auto", "float32", "bfloat16"] = "auto"
    """Compute dtype of forward and backward; weights, gradient sums and optimizer are float32 unless the three options below
    are set. auto: float32 on the CPU, bfloat16 on GPUs."""
    main_params_dtype: StoredDtype = "fp32"
    """Dtype in which trained weights are kept. bf16: 2 bytes each in place of 4, rounded stochastically after every step, since
    most steps of a small learning rate are smaller than bfloat16 resolves; requires precision bfloat16."""
    exp_avg_dtype: StoredDtype = "fp32"
    """Dtype in which Adam's first moment is kept."""
    exp_avg_sq_dtype: StoredDtype = "fp32"
    """Dtype in which Adam's second moment is kept; bf16 is rounded stochastically, so that it can decay."""
    fp8_recipe: Literal["rowwise", "rowwise_with_gw_hp"] | None = None
    """Compute the products of linear layers in a dense decoder, but not of the output head, in float8 by torchao's recipe of
    this name; the second one leaves gradients of weights in bfloat16. On a CPU it is emulated. Requires slime-fsdp[fp8]."""
    gradient_checkpointing: bool = False
    """Keep only each layer's input and recompute the rest in the backward: less memory, about a third slower."""
    fsdp_cpu_offload: bool = False
    """Keep weights, gradients and optimizer in host memory between uses. GPUs only."""
    attn_implementation: Literal["packed", "sdpa", "eager", "flash_attention_2", "flash_attention_3"] = "packed"
    """packed: slime's own, no padding and no dense mask. The others are those of transformers; sdpa and eager build a dense
    mask over the whole micro-batch."""
    share_prompts: bool | None = None
    """Compute a prompt once for all its responses in a micro-batch, and leave out tokens whose output is not read. Log-probs
    and gradients are equal up to rounding. By default on; it requires attn_implementation packed and no context parallelism."""
    linear: Literal["auto", "torch", "onednn"] = "auto"
    """Kernel of the linear layers on a CPU in float32. `torch` is what transformers runs; `onednn` measured twice as
    fast on AMD processors and as exact, but its sums are added in another order. `auto`: oneDNN where torch has it."""
    log_probs_chunk_size: int = Field(0, ge=-1)
    """Response positions whose float32 logits exist at once. 0: as many as fit 512 MiB; -1: all."""
    compile: bool = False
    """torch.compile each layer and the functions of logits: faster steps after a slow start."""
    reshard_after_forward: bool = True
    """Free a layer's gathered weights after its forward and gather them again in the backward. Off: faster, more
    memory."""
    sync_each_micro_batch: bool | None = None
    """Reduce gradients after every micro-batch, so that no rank holds whole gradients. Off: once a step, less
    communication. By default on for GPUs, off on the CPU."""
    freeze_params_name_list: tuple[str, ...] = ()
    """Regular expressions: parameters whose Hugging Face name matches one are not trained."""
    only_train_params_name_list: tuple[str, ...] = ()
    """Regular expressions: if any is given, only parameters that match one are trained."""

    lora_rank: int = Field(0, ge=0)
    """Train LoRA adapters of this rank beside the frozen weights; 0: train the weights themselves. Requires
    slime-fsdp[lora]."""
    lora_alpha: int | None = Field(None, gt=0)
    """Adapters are scaled by lora_alpha / lora_rank. By default 16."""
    target_modules: tuple[str, ...] = ()
    """Linear layers that get adapters, by the ends of their names. By default all in the decoder layers."""
    lora_adapter_path: RunPath | None = None
    """Folder of a LoRA adapter in peft's format to resume from; its adapter_config.json sets rank, alpha and target
    modules."""

    max_adapters: int | None = Field(None, ge=0)
    """Freeze the weights and hold up to this many LoRA adapters over them, each with its own optimizer, for a loop of one's
    own (`session.add_adapter`). By default 0: none."""

    @property
    def trains_adapters(self) -> bool:
        return self.lora_rank > 0 or self.lora_adapter_path is not None

    @property
    def freezes_base(self) -> bool:
        """Adapters alone are trained."""
        return self.trains_adapters or bool(self.max_adapters)

    @property
    def rounds_state(self) -> bool:
        return "bf16" in (self.main_params_dtype, self.exp_avg_dtype, self.exp_avg_sq_dtype)

    @property
    def can_share_prompts(self) -> bool:
        return self.attn_implementation == "packed" and self.context_parallel_size == 1

    @property
    def shares_prompts(self) -> bool:
        return self.can_share_prompts if self.share_prompts is None else self.share_prompts


def adapter_rank(config: FsdpConfig) -> int:
    """Largest rank of the adapter that is trained; 0: none. Raises ModelError if `lora_adapter_path` cannot be read."""
    if config.lora_adapter_path is None:
        return config.lora_rank
    file = Path(config.lora_adapter_path) / "adapter_config.json"
    try:
        content = json.loads(file.read_bytes())
        return max(int(content["r"]), *map(int, (content.get("rank_pattern") or {}).values()), 1)
    except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
        raise ModelError(
            f"backend.lora_adapter_path: {file} cannot be read: {type(error).__name__}: {error}"
        ) from error


def layout_of(config: FsdpConfig, rank: int, world_size: int) -> Layout:
    cp_size = config.context_parallel_size
    return Layout(
        dp_rank=rank // cp_size,
        dp_size=world_size // cp_size,
        cp_rank=rank % cp_size,
        cp_size=cp_size,
        reports=True,
        shares_prompts=config.shares_prompts,
    )


def problems_of(config: FsdpConfig, world_size: int, model_config: Mapping[str, Any]) -> list[str]:
    """`model_config`: content of the trained model's config.json."""
    problems = option_problems(config, world_size)
    if model_config.get("model_type") in WITH_LINEAR_ATTENTION:
        problems += linear_attention_problems(config)
    if config.fp8_recipe is not None:
        problems += float8_problems(config, model_config)
    return problems + adapter_problems(config) + held_adapter_problems(config) + model_problems(model_config)


def option_problems(config: FsdpConfig, world_size: int) -> list[str]:
    cp_size = config.context_parallel_size
    problems = []
    if world_size % cp_size:
        problems.append(
            f"backend.context_parallel_size = {cp_size}: does not divide the {world_size} ranks; "
            f"set a multiple of {cp_size} ranks or another size."
        )
    if cp_size > 1 and config.attn_implementation != "packed":
        problems.append(
            f'backend.attn_implementation = "{config.attn_implementation}": context parallelism requires "packed".'
        )
    if config.share_prompts and not config.can_share_prompts:
        problems.append(
            'backend.share_prompts = true: requires attn_implementation = "packed" and context_parallel_size = 1.'
        )
    if config.main_params_dtype == "bf16" and config.precision == "float32":
        problems.append(
            'backend.main_params_dtype = "bf16": it leaves nothing to compute in float32. Set precision = "bfloat16".'
        )
    if config.main_params_dtype == "bf16" and config.trains_adapters:
        problems.append('backend.main_params_dtype = "bf16": adapters are small and stay in float32. Leave it out.')
    return problems


def linear_attention_problems(config: FsdpConfig) -> list[str]:
    problems = []
    if config.attn_implementation != "packed":
        problems.append(
            f'backend.attn_implementation = "{config.attn_implementation}": linear attention requires "packed", or states '
            "would continue from one sequence into the next."
        )
    if config.context_parallel_size > 1:
        problems.append(
            f"backend.context_parallel_size = {config.context_parallel_size}: linear attention is not sharded over ranks here. "
            "Leave it out, or use backend megatron."
        )
    if config.share_prompts:
        problems.append("backend.share_prompts = true: linear attention has one state per sequence. Leave it out.")
    return problems


def float8_problems(config: FsdpConfig, model_config: Mapping[str, Any]) -> list[str]:
    problems = []
    if find_spec("torchao") is None:
        problems.append('requires torchao, which is not installed. Install it: pip install "slime-fsdp[fp8]".')
    if config.precision == "float32":
        problems.append('what is not in float8 is bfloat16. Leave precision = "float32" out.')
    if config.trains_adapters:
        problems.append("the base of adapters is not computed in float8. Leave the adapters out.")
    if config.context_parallel_size > 1:
        problems.append("parts of sequences are not padded to multiples of 16 tokens. Leave context_parallel_size out.")
    model_type = model_config.get("model_type")
    if model_type in WITH_IMAGES or model_type in WITH_LINEAR_ATTENTION:
        problems.append(f"{model_type} has other layers than a dense decoder. Leave it out.")
    if any(model_config.get(key) for key in EXPERTS):
        problems.append(
            f"the experts of {model_type} would stay in bfloat16, and they are most of its work. Leave it out."
        )
    return [f'backend.fp8_recipe = "{config.fp8_recipe}": {problem}' for problem in problems]


def optimizer_problems(config: FsdpConfig, name: str, optimizer: type[OptimizerDriver]) -> list[str]:
    problems = []
    if config.rounds_state and not optimizer.rounds_state:
        problems.append(
            f'train.optimizer = "{name}": it does not round what it keeps; leave backend.main_params_dtype, exp_avg_dtype '
            "and exp_avg_sq_dtype out."
        )
    if config.trains_adapters and optimizer.needs_hidden:
        problems.append(
            f'train.optimizer = "{name}": it steps on matrices of layers, and an adapter has the two factors of their change. '
            "Set optimizer adam, or leave the adapters out."
        )
    return problems


def adapter_problems(config: FsdpConfig) -> list[str]:
    given = [name for name in ("lora_alpha", "target_modules") if getattr(config, name)]
    if not config.trains_adapters:
        return [f"backend.{name}: has no effect without adapters. Set backend.lora_rank too." for name in given]
    problems = []
    if find_spec("peft") is None:
        asked = f"lora_rank = {config.lora_rank}" if config.lora_rank else "lora_adapter_path"
        problems.append(
            f"backend.{asked}: requires peft, which is not installed. Install it: pip install slime-fsdp[lora]."
        )
    if config.lora_adapter_path is not None:
        problems += [
            f"backend.{name}: backend.lora_adapter_path sets it already. Leave one of them out."
            for name in (["lora_rank"] if config.lora_rank else []) + given
        ]
    problems += [
        f"backend.{name}: with LoRA only the adapters are trained. Choose them by backend.target_modules."
        for name in ("freeze_params_name_list", "only_train_params_name_list")
        if getattr(config, name)
    ]
    return problems


def held_adapter_problems(config: FsdpConfig) -> list[str]:
    if not config.max_adapters:
        return []
    where = f"backend.max_adapters = {config.max_adapters}"
    problems = []
    if config.trains_adapters:
        problems.append(
            f"{where}: leave lora_rank and lora_adapter_path out; each adapter gets its rank when it is added."
        )
    if config.compile:
        problems.append(f"{where}: compiled layers have no adapters. Leave backend.compile out.")
    if config.rounds_state:
        problems.append(
            f"{where}: adapters are small and stay in float32. Leave main_params_dtype, exp_avg_dtype and exp_avg_sq_dtype out."
        )
    problems += [
        f"{where}: no weight of the base is trained. Leave backend.{name} out."
        for name in ("freeze_params_name_list", "only_train_params_name_list")
        if getattr(config, name)
    ]
    return problems


def true_on_policy_problems(config: FsdpConfig) -> list[str]:
    problems = []
    if config.attn_implementation != "packed":
        problems.append(f'attn_implementation = "{config.attn_implementation}" is not batch-invariant; set "packed"')
    if config.linear == "onednn":
        problems.append('linear = "onednn" is not batch-invariant; set "auto"')
    if config.compile:
        problems.append("compile = true fuses operations, which changes their rounding; leave it out")
    if config.fp8_recipe is not None:
        problems.append(
            f'fp8_recipe = "{config.fp8_recipe}" rounds in the trainer what the engine does not; leave it out'
        )
    if config.trains_adapters:
        problems.append("adapters are merged for the engine, which rounds; train the weights themselves")
    return problems
