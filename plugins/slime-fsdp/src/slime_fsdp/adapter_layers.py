"""Linear layers with adapters, which peft inserts into a model, new or from an adapter folder. peft is an extra of slime-fsdp:
this module is imported only if adapters are requested."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import fields
from pathlib import Path

import torch
from peft import LoraConfig, PeftConfig, inject_adapter_in_model
from peft.tuners import lora
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn
from transformers.modeling_utils import PreTrainedModel

from slime_core.errors import ModelError
from slime_fsdp.adapters import ADAPTER, VALUE_HEAD, Adapters, file_name, is_trained_with_adapters
from slime_fsdp.config import FsdpConfig
from slime_fsdp.folder import ModelFolder

CONFIG_FILE = "adapter_config.json"
WEIGHTS_FILE = "adapter_model.safetensors"
TASK_TYPES = {"lm": "CAUSAL_LM", "value": "TOKEN_CLS"}
DEFAULT_ALPHA = 16
UNDERSTOOD = frozenset(
    {
        "r",
        "lora_alpha",
        "rank_pattern",
        "alpha_pattern",
        "use_rslora",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        # Dropout is off; modules beside the adapters are checked by their weights.
        "lora_dropout",
        "modules_to_save",
        # Metadata.
        "auto_mapping",
        "base_model_name_or_path",
        "inference_mode",
        "peft_version",
        "revision",
        "task_type",
    }
)
"""Keys of an adapter_config.json that may differ from peft's defaults."""
PLAIN_STARTS = (True, False, "gaussian")
"""Values of init_lora_weights that do not change the base weights."""


def add_adapters(
    model: PreTrainedModel, layers: Sequence[nn.Module], config: FsdpConfig, folder: ModelFolder, *, seed: int
) -> Adapters:
    """Inserts adapters into linear layers of `layers`, the decoder's. New ones have A uniform and B = 0, so they change nothing
    yet. On the meta device they have no values. Raises ModelError for what cannot be adapted or read."""
    path = None if config.lora_adapter_path is None else Path(config.lora_adapter_path)
    lora_config = fresh_config(layers, config) if path is None else read_config(path)
    lora_config.task_type = TASK_TYPES[folder.head]
    lora_config.base_model_name_or_path = str(folder.path)
    empty = model.device.type == "meta"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            inject_adapter_in_model(lora_config, model, ADAPTER, low_cpu_mem_usage=empty)
        except ValueError as error:
            raise ModelError(f"{folder.path}: backend fsdp cannot put LoRA adapters into it: {error}") from error
    # New layers are created in training mode.
    model.eval()
    adapted = adapted_layers(model, layers, folder)
    if path is not None and not empty:
        read_weights(model, path)
    if folder.head == "value":
        lora_config.modules_to_save = ["score"]
    return Adapters(
        config=lora_config, scales={name: float(module.scaling[ADAPTER]) for name, module in adapted.items()}
    )


def fresh_config(layers: Sequence[nn.Module], config: FsdpConfig) -> LoraConfig:
    linear = {
        name.rpartition(".")[2]
        for layer in layers
        for name, module in layer.named_modules()
        if isinstance(module, nn.Linear)
    }
    alpha = DEFAULT_ALPHA if config.lora_alpha is None else config.lora_alpha
    return LoraConfig(r=config.lora_rank, lora_alpha=alpha, target_modules=sorted(config.target_modules or linear))


def adapted_layers(model: PreTrainedModel, layers: Sequence[nn.Module], folder: ModelFolder) -> dict[str, lora.Linear]:
    """Adapted layers by name. Raises ModelError for any other kind of module that peft has adapted."""
    inside = {id(module) for layer in layers for module in layer.modules()}
    adapted: dict[str, lora.Linear] = {}
    for name, module in model.named_modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        if id(module) not in inside:
            raise ModelError(
                f"{folder.path}: {name} is not in a decoder layer, and backend fsdp adapts nothing else. "
                "Set other backend.target_modules."
            )
        if type(module) is not lora.Linear or not isinstance(module.base_layer, nn.Linear):
            raise ModelError(
                f"{folder.path}: {name} is not a linear layer, and backend fsdp adapts nothing else. "
                "Set other backend.target_modules."
            )
        adapted[name] = module
    return adapted


def read_config(path: Path) -> LoraConfig:
    file = path / CONFIG_FILE
    if not file.is_file():
        raise ModelError(f"{path}: it has no {CONFIG_FILE}, so it is not an adapter folder of peft.")
    try:
        with warnings.catch_warnings():
            # Keys of another version of peft; the keys of this version are checked below.
            warnings.simplefilter("ignore")
            config = PeftConfig.from_pretrained(str(path))
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{file}: cannot be read: {error}") from error
    if type(config) is not LoraConfig:
        raise ModelError(f"{file}: peft_type = {config.peft_type}; backend fsdp trains LORA.")
    plain = LoraConfig()
    understood = UNDERSTOOD | ({"init_lora_weights"} if config.init_lora_weights in PLAIN_STARTS else frozenset())
    names = [field.name for field in fields(config) if field.name not in understood]
    # peft writes an empty list for an option that was not set.
    other = [name for name in names if (getattr(config, name) or None) != (getattr(plain, name) or None)]
    if other:
        asked = ", ".join(f"{name} = {getattr(config, name)!r}" for name in other)
        raise ModelError(f"{file}: {asked}: backend fsdp trains plain LoRA only.")
    config.inference_mode = False
    config.modules_to_save = None
    return config


def read_weights(model: PreTrainedModel, path: Path) -> None:
    """Loads the adapters, and the value head if the folder has one."""
    file = path / WEIGHTS_FILE
    if not file.is_file():
        raise ModelError(f"{path}: it has no {WEIGHTS_FILE}.")
    try:
        found = load_file(file)
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{file}: cannot be read: {error}") from error
    requested = {file_name(name): p for name, p in model.named_parameters() if is_trained_with_adapters(name)}
    optional = {file_name(name) for name, _ in model.named_parameters() if VALUE_HEAD.match(name)}
    wrong = sorted((requested.keys() ^ found.keys()) - (optional - found.keys()))
    wrong += [name for name in requested.keys() & found.keys() if requested[name].shape != found[name].shape]
    if wrong:
        raise ModelError(
            f"{file}: {len(wrong)} weights do not fit the model and {CONFIG_FILE}, such as {', '.join(wrong[:3])}."
        )
    with torch.no_grad():
        for name, tensor in found.items():
            requested[name].copy_(tensor)
