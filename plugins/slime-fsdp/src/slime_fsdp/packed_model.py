"""PackedModel: a transformers model that is called on packed streams, and its sharding over ranks.

Legend: N tokens, T response tokens.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import PreTrainedModel

from slime_core.errors import ModelError, TrainingError
from slime_core.types.microbatch import MicroBatch
from slime_fsdp.adapters import Adapters, base_name, is_trained_with_adapters
from slime_fsdp.attention import PACKED, AttentionPlan
from slime_fsdp.config import FsdpConfig
from slime_fsdp.folder import ModelFolder
from slime_fsdp.fp32_params import fp32_params
from slime_fsdp.linear_attention import delta_arguments, delta_nets, pack_delta_nets
from slime_fsdp.log_probs import log_probs_of
from slime_fsdp.supported_models import WITH_IMAGES
from slime_fsdp.vision import hidden_states
from slime_training.adapters.low_rank import LowRank
from slime_training.adapters.shape import name_of
from slime_training.alignment import align
from slime_training.batch_invariant.mode import InvariantKernels
from slime_training.batch_invariant.products import product_shapes, require_equal_rows
from slime_training.deterministic_gather import DeterministicGather
from slime_training.file_form import is_as_in_files
from slime_training.fusion import keep_compiled
from slime_training.head import EntropyMode, chunk_positions
from slime_training.onednn import onednn_available, use_onednn
from slime_training.rounded_adamw import STORED
from slime_training.target_log_probs import TargetLogProbs

GATHER_WEIGHTS = ("c10d", "_c10d_functional", "fsdp")
"""Namespaces of torch's operations that gather sharded weights."""


class Outputs(NamedTuple):
    """float32 (T,); None if it was not requested."""

    log_probs: Tensor | None = None
    entropy: Tensor | None = None
    values: Tensor | None = None


class PackedModel(nn.Module):
    """The forward includes the head, so that under FSDP the head's weights are gathered when they are used."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        head: str,
        log_probs_chunk_size: int,
        adapters: Adapters | None = None,
        true_on_policy: bool = False,
        fused_head: bool = False,
        wide: frozenset[str] = frozenset(),
    ) -> None:
        """`fused_head`: see `ChunkedLMHead.fuse`. `wide`: see `fp32_params`."""
        super().__init__()
        self.model = model
        self.adapters = adapters
        self.head = head
        self.log_probs_chunk_size = log_probs_chunk_size
        self.true_on_policy = true_on_policy
        self.fused_head = fused_head
        self.wide = wide

    @property
    def has_delta_nets(self) -> bool:
        """If True, plans have a recurrence."""
        return bool(delta_nets(self.model))

    @property
    def sees_images(self) -> bool:
        """If True, positions are (4, N)."""
        return self.model.config.model_type in WITH_IMAGES

    def forward(
        self,
        micro: MicroBatch,
        plan: AttentionPlan,
        entropy: EntropyMode = "none",
        adapter: LowRank | None = None,
        several: bool = False,
    ) -> Outputs:
        """`adapter`: in use, for the head, whose weights are read instead of called. `several`: positions in `logit_index`
        ascend and repeat."""
        # Only the forward: a backward need not be invariant.
        with InvariantKernels(GATHER_WEIGHTS) if self.true_on_policy else nullcontext():
            return self._forward(micro, plan, entropy, adapter, several)

    def _forward(
        self, micro: MicroBatch, plan: AttentionPlan, entropy: EntropyMode, adapter: LowRank | None, several: bool
    ) -> Outputs:
        attention = attention_arguments(self.model, plan)
        if self.sees_images:
            hidden = hidden_states(self.model, micro, micro.position_ids, attention)
        else:
            hidden = self.model.base_model(
                input_ids=micro.tokens[None],
                position_ids=micro.position_ids[None],
                use_cache=False,
                **attention,
            ).last_hidden_state[0]
        # All responses to a shared prompt are predicted from its last token. If there are no rows, the graph is kept.
        index, places = micro.logit_index, None
        if several and entropy != "gradient":
            index, places = index.unique_consecutive(return_inverse=True)
        hidden = DeterministicGather.apply(hidden, index)
        if self.head == "value":
            return Outputs(values=values_of(hidden, self.model.score))
        linear = self.model.get_output_embeddings()
        added = None
        if adapter is not None and (reduced := adapter.reduced(self.head_name, hidden)) is not None:
            hidden = torch.cat([hidden, reduced], -1)
            added = adapter.layers[self.head_name].b_OR
        chunk = chunk_positions(linear.weight.shape[0], self.log_probs_chunk_size)
        if places is not None:
            given = (hidden, linear.weight, linear.bias, added, micro.targets, places, micro.temperature, chunk)
            log_probs, entropies = TargetLogProbs.apply(*given)
            return Outputs(log_probs=log_probs, entropy=None if entropy == "none" else entropies)
        log_probs, entropies = log_probs_of(
            hidden,
            linear.weight,
            linear.bias,
            micro.targets,
            temperature=micro.temperature,
            chunk=chunk,
            entropy=entropy,
            fuse=self.fused_head,
            added_VR=added,
        )
        return Outputs(log_probs=log_probs, entropy=entropies)

    @cached_property
    def head_name(self) -> str:
        """Of the output layer, in the model."""
        return name_of(self.model, self.model.get_output_embeddings())

    @cached_property
    def weight_names(self) -> list[str]:
        """Names in the model's own state dict, in its order; of tied weights only the name in files."""
        first: dict[int, str] = {}
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            first.setdefault(id(parameter), name)
        kept = set(first.values())
        return [name for name in self.model.state_dict() if name in kept or name not in self.parameter_names]

    @cached_property
    def parameter_names(self) -> frozenset[str]:
        """Names of the parameters; tied ones under each of their names."""
        return frozenset(name for name, _ in self.model.named_parameters(remove_duplicate=False))

    def tensors(self) -> dict[str, Tensor]:
        """The parameters and buffers themselves: a state dict would create a new DTensor for each, 100 us on the host every
        time."""
        return {**dict(self.model.named_parameters(remove_duplicate=False)), **dict(self.model.named_buffers())}

    @cached_property
    def is_as_in_files(self) -> bool:
        return is_as_in_files(self.model)

    def shards(self) -> Iterator[FSDPModule]:
        return (module for module in self.modules() if isinstance(module, FSDPModule))


def forget_iteration(model: PackedModel) -> None:
    """After an error in a forward or backward: FSDP keeps nothing of it, and the next one starts clean. Gradients that were
    accumulated are lost. torch has this since 2.13; before, a sharded model raises TrainingError."""
    if not isinstance(model, FSDPModule):
        return
    if not hasattr(model, "reset_iter_state"):
        raise TrainingError(
            f"out of memory, and FSDP of torch {torch.__version__} cannot repeat a step (2.13 can). Lower --max-tokens-per-gpu."
        )
    model.reset_iter_state()
    # It leaves gradients that were accumulated without a reduction, and no public call drops them.
    for shard in model.shards():
        for group in shard._get_fsdp_state()._fsdp_param_groups:
            for parameter in group.fsdp_params:
                parameter.unsharded_accumulated_grad = None
                if hasattr(parameter, "_unsharded_param"):
                    parameter.unsharded_param.grad = None


def values_of(hidden: Tensor, head: nn.Linear) -> Tensor:
    """(T,) float32 in any compute dtype: bfloat16 would round a value of one to two decimals."""
    bias = None if head.bias is None else head.bias.float()
    return nn.functional.linear(hidden.float(), head.weight.float(), bias)[:, 0]


def attention_arguments(model: PreTrainedModel, plan: AttentionPlan) -> dict[str, Any]:
    """Arguments that a model passes to its attention: slime's plan, or the names that transformers' flash attention reads."""
    if model.config._attn_implementation == PACKED:
        return {"attention_plan": plan, **delta_arguments(plan.recurrence)}
    (run,) = plan.runs
    return {
        "cu_seq_lens_q": run.cu_queries,
        "cu_seq_lens_k": run.cu_keys,
        "max_length_q": run.max_queries,
        "max_length_k": run.max_keys,
    }


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where a model is placed. `mesh` None: one rank, not wrapped."""

    device: torch.device
    mesh: DeviceMesh | None
    compute_dtype: torch.dtype
    cpu_offload: bool
    true_on_policy: bool = False

    @property
    def parameter_device(self) -> torch.device:
        return torch.device("cpu") if self.cpu_offload else self.device


def build_model(
    folder: ModelFolder, config: FsdpConfig, placement: Placement, *, seed: int, trained: bool
) -> PackedModel:
    """Loads the weights once, on rank 0, and distributes them. Frozen copies are kept in the compute dtype."""
    has_adapters = trained and config.trains_adapters
    attention = PACKED if config.attn_implementation == "packed" else config.attn_implementation
    mesh = placement.mesh

    def load() -> tuple[PreTrainedModel, Adapters | None]:
        model = folder.load_model(attention, seed)
        return model, with_adapters(model, folder, config, seed) if has_adapters else None

    loaded, adapters = load_on_first_rank(load, mesh)
    if mesh is None:
        if loaded is None:
            raise AssertionError("one rank loads its own weights")
        model = loaded.to(placement.device)
    else:
        model = folder.empty_model(attention)
        adapters = with_adapters(model, folder, config, seed) if has_adapters else None
    pack_delta_nets(model)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(trained and is_trained(name, parameter, config))
    kept = STORED[config.main_params_dtype] if trained else torch.float32
    wide = fp32_params(model, folder)
    frozen = frozen_dtype(folder, placement, kept, trained=trained, adapters=config.freezes_base)
    store_parameters(model, kept, frozen, wide)
    # The same weights give the same bits, in any file.
    align(model)
    choose_kernels(model, config, placement)
    packed = PackedModel(
        model,
        head=folder.head,
        log_probs_chunk_size=config.log_probs_chunk_size,
        adapters=adapters,
        true_on_policy=placement.true_on_policy,
        fused_head=config.compile,
        wide=wide,
    )
    layers = decoder_layers(model)
    if trained and config.gradient_checkpointing:
        model.gradient_checkpointing_enable({"use_reentrant": False})
        for layer in layers:
            # Only the layer itself reads this flag to checkpoint; its children stay in eval mode, without dropout.
            layer.training = True
    if config.compile:
        keep_compiled()
        for layer in layers:
            layer.compile()
    if mesh is not None:
        shard(packed, layers, config, placement, trained=trained)
        fill(packed, loaded, placement)
    return packed


def choose_kernels(model: PreTrainedModel, config: FsdpConfig, placement: Placement) -> None:
    """Replaces the products of linear layers, or checks that those of torch are batch-invariant where that is required."""
    if config.fp8_recipe is not None:
        from slime_fsdp.float8_layers import use_float8

        use_float8(decoder_layers(model), config.fp8_recipe, emulate=placement.device.type == "cpu")
    if placement.true_on_policy:
        if delta_nets(model):
            raise ModelError("true_on_policy_mode: linear attention is not batch-invariant. Leave the mode off.")
        require_equal_rows(product_shapes(model), placement.compute_dtype, placement.device)
    elif uses_onednn(config, placement):
        use_onednn(model)


def uses_onednn(config: FsdpConfig, placement: Placement) -> bool:
    """Whether linear layers use oneDNN. Raises ModelError if the option requires it and it is not available."""
    fits = placement.device.type == "cpu" and placement.compute_dtype == torch.float32 and not config.compile
    if config.linear == "onednn" and not (fits and onednn_available()):
        raise ModelError(
            'backend.linear = "onednn": requires a CPU, float32, no compile and a torch with oneDNN. Set linear = "auto".'
        )
    return config.linear != "torch" and fits and onednn_available()


def with_adapters(model: PreTrainedModel, folder: ModelFolder, config: FsdpConfig, seed: int) -> Adapters:
    # peft is an extra.
    from slime_fsdp.adapter_layers import add_adapters

    return add_adapters(model, decoder_layers(model), config, folder, seed=seed)


def frozen_dtype(
    folder: ModelFolder, placement: Placement, kept: torch.dtype, *, trained: bool, adapters: bool
) -> torch.dtype:
    """The dtype of frozen weights. The base of adapters is exported, so it is not rounded: lower precision only if the files
    have no more. `kept`: dtype in which trained weights are kept."""
    if not trained or (adapters and folder.dtype == placement.compute_dtype):
        return placement.compute_dtype
    return kept


def store_parameters(model: PreTrainedModel, trained: torch.dtype, frozen: torch.dtype, wide: Collection[str]) -> None:
    """Casts parameters only: buffers such as rotary frequencies keep their precision. `wide`: stay float32 if they are frozen;
    FSDP requires one dtype for all trained parameters."""
    for name, parameter in model.named_parameters():
        untrained = torch.float32 if base_name(name) in wide else frozen
        parameter.data = parameter.data.to(trained if parameter.requires_grad else untrained)


def is_trained(name: str, parameter: nn.Parameter, config: FsdpConfig) -> bool:
    """Whether a parameter is trained. `name`: in the model as transformers or peft builds it."""
    if config.trains_adapters:
        return is_trained_with_adapters(name)
    if config.max_adapters:
        return False
    if not parameter.requires_grad:
        # Biases of routers, for which no loss has a gradient.
        return False
    only = config.only_train_params_name_list
    requested = not only or any(re.search(pattern, name) for pattern in only)
    return requested and not any(re.search(pattern, name) for pattern in config.freeze_params_name_list)


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    layers: list[nn.Module] = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    if not layers:
        raise ModelError(
            f"{type(model).__name__}: no decoder layers found, so it can be neither sharded nor checkpointed."
        )
    return layers


def load_on_first_rank(
    load: Callable[[], tuple[PreTrainedModel, Adapters | None]], mesh: DeviceMesh | None
) -> tuple[PreTrainedModel | None, Adapters | None]:
    """A failure on rank 0 is raised on every rank, so that none waits forever."""
    if mesh is None:
        return load()
    loaded, problem = None, [""]
    adapters = None
    if mesh.get_rank() == 0:
        try:
            loaded, adapters = load()
        except ModelError as error:
            problem = [str(error)]
    dist.broadcast_object_list(problem, src=0, group=mesh.get_group())
    if problem[0]:
        raise ModelError(problem[0])
    return loaded, adapters


def shard(
    packed: PackedModel, layers: list[nn.Module], config: FsdpConfig, placement: Placement, *, trained: bool
) -> None:
    if placement.mesh is None:
        raise AssertionError("sharding requires a mesh")
    lower = placement.compute_dtype != torch.float32
    common: dict[str, Any] = {
        "mesh": placement.mesh,
        "mp_policy": MixedPrecisionPolicy(
            param_dtype=placement.compute_dtype if lower else None,
            reduce_dtype=torch.float32 if lower else None,
            cast_forward_inputs=True,
        ),
        "offload_policy": CPUOffloadPolicy() if placement.cpu_offload else OffloadPolicy(),
    }
    for layer in layers:
        fully_shard(layer, **common, reshard_after_forward=config.reshard_after_forward)
    # The root's weights are needed again as soon as the backward starts; a frozen copy has no backward.
    fully_shard(packed, **common, reshard_after_forward=not trained)
    for module in packed.shards():
        # Sums, not averages: the loss already has its denominator. gloo has no pre-multiplied sum.
        module.set_gradient_divide_factor(1.0)
        module.set_force_sum_reduction_for_comms(True)


def reload(packed: PackedModel, folder: ModelFolder, config: FsdpConfig, placement: Placement, *, seed: int) -> None:
    """Loads the weights of the folder that a model without adapters was built from into it once more."""
    attention = PACKED if config.attn_implementation == "packed" else config.attn_implementation
    loaded, _ = load_on_first_rank(lambda: (folder.load_model(attention, seed), None), placement.mesh)
    if placement.mesh is not None:
        refill(packed, loaded, placement)
        return
    assert loaded is not None
    weights, source = packed.model.state_dict(), loaded.state_dict()
    with torch.no_grad():
        for name in packed.weight_names:
            weights[name].copy_(source[name])


def refill(packed: PackedModel, loaded: PreTrainedModel | None, placement: Placement) -> None:
    """Copies weights of rank 0 to every rank's shards."""
    set_model_state_dict(
        packed.model,
        {} if loaded is None else loaded.state_dict(),
        options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True, cpu_offload=placement.cpu_offload),
    )


def fill(packed: PackedModel, loaded: PreTrainedModel | None, placement: Placement) -> None:
    """Copies weights and buffers of rank 0 to every rank's shards."""
    if placement.mesh is None:
        raise AssertionError("there is one rank: no shards to fill")
    packed.to_empty(device=placement.parameter_device)
    refill(packed, loaded, placement)
    source = {} if loaded is None else dict(loaded.named_buffers())
    for name, buffer in list(packed.model.named_buffers()):
        values = torch.empty_like(buffer, device=placement.device)
        if name in source:
            values.copy_(source[name])
        dist.broadcast(values, src=0, group=placement.mesh.get_group())
        # Buffers are not sharded; they are where the forward runs.
        owner, _, leaf = name.rpartition(".")
        packed.model.get_submodule(owner)._buffers[leaf] = values
