"""Options of the Megatron backend: their checks, and the layout that they set. Nothing heavy is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields
from typing import Any, Final, Literal

from pydantic import Field, ValidationInfo, create_model, field_validator

from slime_core.contracts.backend import Layout
from slime_core.contracts.driver import DriverConfig
from slime_megatron.bridges.family import family_problems
from slime_megatron.layout import ParallelDims, experts_of, shape_problems
from slime_megatron.no_effect import without_effect
from slime_megatron.options import OWNED, installed_options, megatron_folder
from slime_megatron.stages import Stages
from slime_megatron.unsupported_options import REFUSED, option_problems
from slime_training.hooks import TRAINER_HOOKS, bind_hooks

StoredDtype = Literal["fp32", "bf16"]
PREDICTION_COUNTS: Final = ("num_nextn_predict_layers", "mtp_num_hidden_layers")
"""Keys of config.json for the number of layers of multi-token prediction."""
HOW_TO_INSTALL: Final = 'Megatron-core is not installed here: pip install "slime-megatron[core]".'


class MegatronOptions(DriverConfig):
    """The backend's own options. The options of the installed Megatron are added under Megatron's names."""

    tensor_model_parallel_size: int = Field(1, gt=0)
    """Ranks that share each layer's matrices."""
    sequence_parallel: bool = False
    """Norms and residuals share their tokens over the tensor-parallel ranks too. No effect without tensor parallelism."""
    pipeline_model_parallel_size: int = Field(1, gt=0)
    """Stages that the layers are spread over."""
    virtual_pipeline_model_parallel_size: int | None = Field(None, gt=1)
    """Pieces of the model on each pipeline stage, run interleaved. Micro-batches come in multiples of the stages."""
    context_parallel_size: int = Field(1, gt=0)
    """Ranks that share the tokens of each sequence (zigzag)."""
    expert_model_parallel_size: int = Field(1, gt=0)
    """Ranks over which the experts are spread."""
    expert_tensor_parallel_size: int | None = Field(None, gt=0)
    """Ranks that share each expert's matrices; by default as many as share the other layers'."""
    use_distributed_optimizer: bool | None = None
    """Spread the optimizer's state over the data-parallel ranks. By default on for GPUs, off on the CPU. Adam only."""
    bf16: bool | None = None
    """Compute in bfloat16, with float32 weights, gradient sums and optimizer. By default on GPUs, where fp16 is off. A run that
    resumes on another device keeps its dtype: set the option there."""
    fp16: bool = False
    """Compute in float16 with a loss scale."""
    main_params_dtype: StoredDtype = "fp32"
    """Dtype of the weights that the optimizer steps on. bf16: the weights themselves, rounded stochastically, with no float32
    copy; every data-parallel rank then has all of them and of their moments. Adam in bfloat16 only."""
    exp_avg_dtype: StoredDtype = "fp32"
    """Dtype in which Adam's first moment is kept; with or without Transformer Engine."""
    exp_avg_sq_dtype: StoredDtype = "fp32"
    """Dtype in which Adam's second moment is kept; bf16 is rounded stochastically, so that it can decay."""
    moe_grouped_gemm: bool | None = None
    """Compute the experts that a rank holds together, by torch's own grouped products. By default on for experts with gated
    SiLU and no biases; false: Megatron's experts, one after the other. Checkpoints are the same for both."""
    log_probs_chunk_size: int = Field(0, ge=-1)
    """Response positions whose float32 logits exist at once. 0: as many as fit 512 MiB; -1: all."""
    mtp_num_layers: int = Field(0, ge=0)
    """Layers of multi-token prediction to train with the policy, as many as the folder has or fewer; 0: they stay unchanged."""
    mtp_loss_scaling_factor: float = Field(0.2, ge=0)
    """Weight of the mean of their cross-entropies in the loss."""
    freeze_params_name_list: tuple[str, ...] = ()
    """Regular expressions: parameters whose Megatron name matches one are not trained."""
    only_train_params_name_list: tuple[str, ...] = ()
    """Regular expressions: if any is given, only parameters that match one are trained."""

    hooks: dict[str, Any] | None = None
    """Functions that every trainer rank calls: before it builds the model, before log-probs, before an optimizer step. A plugin
    of the group slime_training.hooks and its options, such as { name = "compat", ... } for functions of upstream slime."""

    @field_validator("hooks", mode="before")
    @classmethod
    def check_hooks(cls, value: Any, info: ValidationInfo) -> dict[str, Any] | None:
        return bind_hooks(TRAINER_HOOKS, value, where="backend.hooks", base=(info.context or {}).get("base"))

    @property
    def rounds_state(self) -> bool:
        return "bf16" in (self.main_params_dtype, self.exp_avg_dtype, self.exp_avg_sq_dtype)

    @property
    def shape(self) -> ParallelDims:
        return ParallelDims(
            tp=self.tensor_model_parallel_size,
            pp=self.pipeline_model_parallel_size,
            vpp=self.virtual_pipeline_model_parallel_size or 1,
            cp=self.context_parallel_size,
            ep=self.expert_model_parallel_size,
            etp=self.expert_tensor_parallel_size or self.tensor_model_parallel_size,
            sequence_parallel=self.sequence_parallel and self.tensor_model_parallel_size > 1,
            stages=Stages(**{field.name: getattr(self, field.name, None) for field in fields(Stages)}),
        )

    def distributes_optimizer(self, device: str, optimizer: str) -> bool:
        """Whether the optimizer is distributed: `use_distributed_optimizer` or its default. An optimizer that steps on the
        weights themselves cannot be."""
        if self.use_distributed_optimizer is not None:
            return self.use_distributed_optimizer
        return device == "cuda" and optimizer == "adam" and self.main_params_dtype == "fp32"


def make_config() -> type[MegatronOptions]:
    """Returns MegatronOptions with Megatron's options added. None: Megatron's default."""
    found: dict[str, Any] = {}
    for option in installed_options():
        if option.name in MegatronOptions.model_fields:
            continue
        if (reason := refusal_of(option.name)) is not None:
            doc = f"Not an option of the backend: {reason}."
            found[option.name] = (Any, Field(default=None, description=doc, exclude=True, repr=False))
        else:
            found[option.name] = (option.type | None, Field(default=None, description=option.doc))
    refused = sorted(name for name in found if refusal_of(name) is not None)
    validators: dict[str, Any] = {"refuse": field_validator(*refused)(refuse)} if refused else {}
    return create_model("MegatronConfig", __base__=MegatronOptions, __validators__=validators, **found)


def refusal_of(name: str) -> str | None:
    """Why the backend refuses an option of Megatron; None: it is supported."""
    return f"it is decided by {OWNED[name]}" if name in OWNED else REFUSED.get(name)


def refuse(cls: type[MegatronOptions], value: Any, info: Any) -> Any:
    if value is not None:
        raise ValueError(f"this is not an option of the backend: {refusal_of(info.field_name)}")
    return value


MegatronConfig: Final = make_config()


def megatron_options(config: MegatronOptions, of: str) -> dict[str, Any]:
    """The options of the run file that belong to the model's, the optimizer's or the data-parallel record (`of`)."""
    names = sorted(
        {option.name for option in installed_options() if option.of == of}
        - set(MegatronOptions.model_fields)
        - set(options_without_effect(config))
    )
    return {name: value for name in names if refusal_of(name) is None and (value := getattr(config, name)) is not None}


def given_options(config: MegatronOptions) -> dict[str, Any]:
    """All options that are set, the backend's own and Megatron's."""
    return {name: value for name in type(config).model_fields if (value := getattr(config, name)) is not None}


def options_without_effect(config: MegatronOptions) -> dict[str, str]:
    """Options that are set and change nothing, to the reason."""
    return without_effect(given_options(config))


def layout_of(config: MegatronOptions, rank: int, world_size: int) -> Layout:
    shape = config.shape
    tp_rank, rest = rank % shape.tp, rank // shape.tp
    cp_rank, rest = rest % shape.cp, rest // shape.cp
    dp_size = world_size // (shape.tp * shape.cp * shape.pp)
    return Layout(
        dp_rank=rest % dp_size,
        dp_size=dp_size,
        cp_rank=cp_rank,
        cp_size=shape.cp,
        reports=tp_rank == 0 and rest // dp_size == shape.pp - 1,
        micro_batch_multiple=shape.pp if shape.vpp > 1 else 1,
    )


def problems_of(config: MegatronOptions, world_size: int, model_config: Mapping[str, Any]) -> list[str]:
    """`model_config`: content of the trained model's config.json."""
    text = model_config.get("text_config", model_config)
    problems = own_option_problems(config)
    if config.mtp_num_layers:
        problems += prediction_problems(config, text)
    ignored = options_without_effect(config)
    given = {name: value for name, value in given_options(config).items() if name not in ignored}
    problems += option_problems(given, experts_of(text))
    return problems + family_problems(model_config) + shape_problems(config.shape, world_size, text)


def own_option_problems(config: MegatronOptions) -> list[str]:
    problems = []
    if megatron_folder() is None:
        problems.append(f'backend.name = "megatron": {HOW_TO_INSTALL}')
    if config.fp16 and config.bf16:
        problems.append("backend.fp16 = true and backend.bf16 = true: they exclude each other. Choose one of them.")
    if config.rounds_state:
        problems += [
            f"backend.{name} = true: it has its own form of state. Leave backend.main_params_dtype, exp_avg_dtype "
            "and exp_avg_sq_dtype out, or this option."
            for name in ("optimizer_cpu_offload", "use_precision_aware_optimizer")
            if getattr(config, name, None)
        ]
    if config.main_params_dtype == "bf16":
        given = 'backend.main_params_dtype = "bf16"'
        if config.fp16 or config.bf16 is False:
            problems.append(
                f"{given}: weights that are kept in bfloat16 are computed with in bfloat16. Set bf16 = true."
            )
        if config.use_distributed_optimizer:
            problems.append(
                f"{given}, use_distributed_optimizer = true: Megatron's steps on float32 copies that ranks share. Leave "
                "one of them out."
            )
    return problems


def prediction_problems(config: MegatronOptions, model_config: Mapping[str, Any]) -> list[str]:
    # Qwen3-Next has such a layer, but its config.json has no count: in a folder without one, the missing tensors are reported.
    key = next((key for key in PREDICTION_COUNTS if model_config.get(key) is not None), None)
    if key is None or config.mtp_num_layers <= model_config[key]:
        return []
    there = model_config[key]
    return [
        f"backend.mtp_num_layers = {config.mtp_num_layers}: the model has {there} layers of multi-token prediction "
        f"({key} in its config.json). " + (f"Set {there} or less." if there else "Leave it out.")
    ]
