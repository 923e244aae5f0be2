"""Estimates what a rank holds, on the meta device: parameters and states exact to the byte, activations as an estimate."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from slime_fsdp.adapters import base_name, is_trained_with_adapters
from slime_fsdp.config import FsdpConfig
from slime_fsdp.folder import ModelFolder, open_folder
from slime_fsdp.fp32_params import fp32_params
from slime_fsdp.packed_model import Placement, decoder_layers, frozen_dtype, is_trained, with_adapters
from slime_fsdp.sharding import Sharding
from slime_training.chosen_optimizer import chosen_optimizer
from slime_training.footprint import DecoderShape, head_work, kept_per_token, not_counted, not_estimated_activations
from slime_training.memory_plan import AWAKE, MemoryItem, MemoryPhase, TrainerLoad, TrainerMemory
from slime_training.rounded_adamw import STORED

STEPPING = frozenset({MemoryPhase.REDUCE, MemoryPhase.STEP})
BACKWARD = frozenset({MemoryPhase.LOSS, MemoryPhase.BACKWARD})


@dataclass(frozen=True, kw_only=True)
class Allocation:
    """A parameter, allocated on this rank."""

    whole: int
    shard: int
    """Elements of it on the rank that has the most."""
    dtype: torch.dtype
    trained: bool
    in_layer: bool

    @property
    def num_bytes(self) -> int:
        return self.shard * self.dtype.itemsize


def memory_of(config: FsdpConfig, load: TrainerLoad) -> TrainerMemory:
    """See `BackendDriver.memory`."""
    setup, sharding = load.setup, Sharding.of(config, load.setup.device, load.setup.world_size)
    folder = open_folder(setup.model_path, head=setup.head, trust_remote_code=setup.trust_remote_code, weights=False)
    model = folder.empty_model("sdpa")
    if config.trains_adapters:
        with_adapters(model, folder, config, setup.seed)
    held = list(parameters_of(model, folder, config, sharding))
    lines = (
        *states(config, load, sharding, held),
        *frozen_models(config, load, sharding, model),
        *gathered(config, load, sharding, held, len(decoder_layers(model))),
        *activations(config, load, sharding, model),
    )
    not_estimated = not_estimated_activations(folder.config.to_dict())
    if config.max_adapters:
        not_estimated = (*not_estimated, "adapters, whose ranks are chosen when they are added")
    if chosen_optimizer(setup).driver.moments is None:
        not_estimated = (
            *not_estimated,
            f'the state of train.optimizer = "{setup.optimizer.optimizer}", which does not report it',
        )
    return TrainerMemory(lines=lines, not_estimated=not_estimated)


def parameters_of(
    model: PreTrainedModel, folder: ModelFolder, config: FsdpConfig, sharding: Sharding
) -> Iterator[Allocation]:
    """All parameters, in the dtype in which training stores them; tied ones once."""
    in_layers = {id(parameter) for layer in decoder_layers(model) for parameter in layer.parameters()}
    main = STORED[config.main_params_dtype]
    placement = Placement(device=torch.device("meta"), mesh=None, compute_dtype=sharding.compute, cpu_offload=False)
    frozen = frozen_dtype(folder, placement, main, trained=True, adapters=config.freezes_base)
    wide = fp32_params(model, folder)
    for name, parameter in model.named_parameters():
        trained = is_trained(name, parameter, config)
        untrained = torch.float32 if base_name(name) in wide else frozen
        yield Allocation(
            whole=parameter.numel(),
            shard=shard_of(parameter, sharding.world_size),
            dtype=main if trained else untrained,
            trained=trained,
            in_layer=id(parameter) in in_layers,
        )


def place_of(sharding: Sharding) -> Literal["device", "host"]:
    return "host" if sharding.offloaded else "device"


def shard_of(parameter: nn.Parameter, world_size: int) -> int:
    """Elements of a rank's shard: FSDP shards the first dimension."""
    rows = parameter.shape[0] if parameter.dim() else 1
    return -(-rows // world_size) * (parameter.numel() // max(rows, 1))


def states(
    config: FsdpConfig, load: TrainerLoad, sharding: Sharding, held: Sequence[Allocation]
) -> Iterator[MemoryItem]:
    """Weights, gradients and moments: exact."""
    place, trained = place_of(sharding), [one for one in held if one.trained]
    yield MemoryItem(component="weights", num_bytes=sum(one.num_bytes for one in held), moments=AWAKE, place=place)
    several = load.num_micro_batches > 1
    gradients = sum(one.num_bytes for one in trained)
    rounded = config.main_params_dtype == "bf16"
    # Gradients of bfloat16 weights are summed in separate float32 tensors.
    kept = STEPPING | (BACKWARD if several and not rounded else frozenset())
    yield MemoryItem(component="gradients", num_bytes=gradients, moments=kept, place=place)
    if rounded and several:
        sums = 4 * sum(one.shard for one in trained)
        moments = BACKWARD | {MemoryPhase.REDUCE}
        yield MemoryItem(component="gradient sums", num_bytes=sums, moments=moments, place=place, note="float32")
    moments = chosen_optimizer(load.setup).driver.moments or ()
    # torch's own optimizers keep moments in the dtype of the weights.
    kept_in = (config.exp_avg_dtype, config.exp_avg_sq_dtype) if config.rounds_state else ("fp32",) * len(moments)
    for component, name in zip(moments, kept_in, strict=False):
        width = STORED[name].itemsize
        size = width * sum(one.shard for one in trained)
        yield MemoryItem(component=component, num_bytes=size, moments=AWAKE - {MemoryPhase.SYNC}, place=place)


def frozen_models(
    config: FsdpConfig, load: TrainerLoad, sharding: Sharding, model: PreTrainedModel
) -> Iterator[MemoryItem]:
    """Frozen models, in the compute dtype. For copies of the folder that adapters are trained on, only the adapters."""
    setup = load.setup
    for name, path in setup.frozen_models.items():
        if config.freezes_base and setup.head == "lm" and path.resolve() == setup.model_path.resolve():
            adapters = (parameter for name, parameter in model.named_parameters() if is_trained_with_adapters(name))
            size = 4 * sum(shard_of(parameter, sharding.world_size) for parameter in adapters)
        else:
            folder = open_folder(path, trust_remote_code=setup.trust_remote_code, weights=False)
            frozen = folder.empty_model("sdpa")
            wide, element = fp32_params(frozen, folder), sharding.compute.itemsize
            size = sum(
                shard_of(parameter, sharding.world_size) * (4 if name in wide else element)
                for name, parameter in frozen.named_parameters()
            )
        yield MemoryItem(
            component=f"copy: {name}", num_bytes=size, moments=AWAKE - {MemoryPhase.SYNC}, place=place_of(sharding)
        )


def gathered(
    config: FsdpConfig, load: TrainerLoad, sharding: Sharding, held: Sequence[Allocation], num_layers: int
) -> Iterator[MemoryItem]:
    """Weights that FSDP gathers to compute with, and frees again."""
    if not sharding.sharded:
        return
    element = sharding.compute.itemsize
    in_layers, trained = sum(one.whole for one in held if one.in_layer), [one for one in held if one.trained]
    layer = in_layers // num_layers
    root = sum(one.whole for one in held if not one.in_layer)
    during = frozenset({MemoryPhase.SCORE, MemoryPhase.LOSS, MemoryPhase.BACKWARD, MemoryPhase.REDUCE})
    yield MemoryItem(component="gathered: embedding and head", num_bytes=root * element, moments=during, estimate=True)
    # A layer and the next one, which is gathered meanwhile.
    layers = 2 * layer if config.reshard_after_forward else in_layers
    yield MemoryItem(
        component="gathered: layers", num_bytes=layers * element, moments=during - {MemoryPhase.REDUCE}, estimate=True
    )
    largest = max(root, layer)
    yield MemoryItem(
        component="gathered: export", num_bytes=largest * element, moments=frozenset({MemoryPhase.SYNC}), estimate=True
    )
    # The head's gradient is kept until the embedding's, which comes last; then both are summed in float32.
    of_root = sum(one.whole for one in trained if not one.in_layer)
    moments = frozenset({MemoryPhase.BACKWARD, MemoryPhase.REDUCE})
    yield MemoryItem(component="whole gradients", num_bytes=of_root * element, moments=moments, estimate=True)
    if element < 4:
        wide = 4 * of_root
        if config.main_params_dtype == "bf16":
            wide += 4 * sum(one.shard for one in trained if not one.in_layer)
        yield MemoryItem(
            component="reduction in float32", num_bytes=wide, moments=frozenset({MemoryPhase.REDUCE}), estimate=True
        )
    each = config.sync_each_micro_batch
    if (load.setup.device == "cpu" if each is None else not each) and load.num_micro_batches > 1:
        size = 4 * sum(one.whole for one in trained if one.in_layer)
        yield MemoryItem(
            component="gradients of whole layers", num_bytes=size, moments=moments | {MemoryPhase.LOSS}, estimate=True
        )


def activations(
    config: FsdpConfig, load: TrainerLoad, sharding: Sharding, model: PreTrainedModel
) -> Iterator[MemoryItem]:
    """Estimates; none for layers whose tensors were not counted."""
    model_config = model.config.to_dict()
    if not_counted(model_config) is not None:
        return
    normed = any(".q_norm." in name for name, _ in model.named_parameters())
    shape, element = DecoderShape.of(model_config, normed=normed), sharding.compute.itemsize
    kept = kept_per_token(shape, element=element, fused=config.compile, context_parallel=config.context_parallel_size)
    each_layer = kept.checkpoint if config.gradient_checkpointing else kept.whole
    yield MemoryItem(
        component="activations",
        num_bytes=shape.layers * each_layer * load.tokens,
        moments=BACKWARD,
        estimate=True,
        note="inputs of layers, which are computed again" if config.gradient_checkpointing else "",
    )
    again = kept.whole if config.gradient_checkpointing else 0
    yield MemoryItem(
        component="one layer at work",
        num_bytes=(again + kept.work) * load.tokens,
        moments=frozenset({MemoryPhase.BACKWARD}),
        estimate=True,
    )
    forward = kept.forward * load.scored_tokens
    yield MemoryItem(
        component="one layer at work", num_bytes=forward, moments=frozenset({MemoryPhase.SCORE}), estimate=True
    )
    if load.setup.head != "lm":
        return
    for tokens, moment in ((load.tokens, MemoryPhase.LOSS), (load.scored_tokens, MemoryPhase.SCORE)):
        work = head_work(
            tokens=tokens,
            hidden=shape.hidden,
            vocab=shape.vocab,
            asked_chunk=config.log_probs_chunk_size,
            element=element,
            fused=config.compile,
            trained=not config.freezes_base,
        )
        size = work.loss if moment is MemoryPhase.LOSS else work.forward
        yield MemoryItem(component="head in chunks", num_bytes=size, moments=frozenset({moment}), estimate=True)
