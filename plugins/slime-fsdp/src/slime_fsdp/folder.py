"""A Hugging Face folder: its content, and whether it can be trained."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, nullcontext
from copy import deepcopy
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    AutoModelForTokenClassification,
    PreTrainedConfig,
)
from transformers.modeling_utils import PreTrainedModel

from slime_core.data.model_folder import check_weights
from slime_core.errors import ModelError
from slime_fsdp.attention import PACKED
from slime_fsdp.supported_models import WITH_IMAGES, WITH_LINEAR_ATTENTION, layer_problems
from slime_training.model_config import config_file_of, with_rotated_share
from slime_training.value_head import start_value_head
from slime_training.weight_files import dtypes_in

HEADS: dict[str, Any] = {"lm": AutoModelForCausalLM, "value": AutoModelForTokenClassification}
"""The transformers class of each `TrainerSetup.head`. A token classifier with one label is a value model: any tool
that knows transformers loads what `save_hf` writes."""


@dataclass(frozen=True, kw_only=True)
class ModelFolder:
    path: Path
    head: str
    config: PreTrainedConfig
    trust_remote_code: bool

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of most weights on disk, from config.json; float32 if it has none."""
        found = self.config.dtype
        return found if isinstance(found, torch.dtype) else torch.float32

    @cached_property
    def wide(self) -> frozenset[str]:
        """Names of the few float32 tensors of a half-precision folder, such as gates and biases of routers."""
        if self.dtype.itemsize >= torch.float32.itemsize:
            return frozenset()
        dtypes = dtypes_in(self.path)
        found = frozenset(name for name, dtype in dtypes.items() if dtype == torch.float32)
        # If most are float32, the dtype in config.json is wrong.
        return found if 2 * len(found) < len(dtypes) else frozenset()

    @property
    def sees_images(self) -> bool:
        return self.config.model_type in WITH_IMAGES

    @property
    def auto_class(self) -> Any:
        """transformers' class for this head and model."""
        return AutoModelForImageTextToText if self.sees_images and self.head == "lm" else HEADS[self.head]

    def unknown(self, unexpected: Iterable[str]) -> list[str]:
        """Returns the names in `unexpected` that belong neither to another head nor to layers of multi-token prediction behind
        the model's own. Code in the folder may ignore any name."""
        if self.trust_remote_code and hasattr(self.config, "auto_map"):
            return []
        text = self.config.get_text_config()
        ahead = getattr(text, "num_nextn_predict_layers", None) or 0
        known = [f".layers.{text.num_hidden_layers + number}." for number in range(ahead)]
        if self.head == "value":
            known.append("lm_head.")
        return sorted(name for name in unexpected if not any(part in name for part in known))

    def attention(self, implementation: str) -> Any:
        """Packed attention is used by the language model only; the vision tower attends within whole images, by transformers'
        own code."""
        if not self.sees_images:
            return implementation
        towers = {"": implementation, "text_config": implementation}
        return towers | {"vision_config": "sdpa" if implementation == PACKED else implementation}

    def empty_model(self, attn_implementation: str) -> PreTrainedModel:
        """The model on the meta device, in float32."""
        with torch.device("meta"):
            model: PreTrainedModel = self.auto_class.from_config(
                # transformers writes the requested dtype into the config.
                deepcopy(self.config),
                attn_implementation=self.attention(attn_implementation),
                dtype=torch.float32,
                trust_remote_code=self.trust_remote_code,
            )
        return model.eval()

    def load_model(self, attn_implementation: str, seed: int) -> PreTrainedModel:
        """The model with its weights, in float32, on the CPU. A value head that the folder lacks is initialized by
        `start_value_head`."""
        try:
            with expected_differences() if self.head == "value" else nullcontext():
                model, info = self.auto_class.from_pretrained(
                    self.path,
                    config=self.config,
                    attn_implementation=self.attention(attn_implementation),
                    dtype=torch.float32,
                    trust_remote_code=self.trust_remote_code,
                    local_files_only=True,
                    output_loading_info=True,
                )
        except (OSError, ValueError, RuntimeError, KeyError, SafetensorError) as error:
            raise ModelError(f"{self.path}: the weights cannot be loaded: {error}") from error
        missing = set(info["missing_keys"])
        if self.head == "value":
            fresh = {name for name in missing if name.startswith("score.")}
            if fresh:
                start_value_head(model.score.weight, model.score.bias, seed)
            missing -= fresh
        if missing:
            some = ", ".join(sorted(missing)[:3])
            raise ModelError(f"{self.path}: {len(missing)} weights are missing from its files, such as {some}.")
        if extra := self.unknown(info["unexpected_keys"]):
            raise ModelError(
                f"{self.path}: {len(extra)} tensors of its files do not belong to a {self.config.model_type} model, such as "
                f"{', '.join(extra[:3])}. Training would lose them. Check that config.json is of the same model."
            )
        return model.eval()


@contextmanager
def expected_differences() -> Iterator[None]:
    """Silences transformers' warning that a language model's folder has another head; missing weights are checked here."""
    logger = logging.getLogger("transformers.modeling_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def open_folder(path: Path, *, head: str = "lm", trust_remote_code: bool = False, weights: bool = True) -> ModelFolder:
    """Raises ModelError for a folder that transformers could not load, before weights are read. `weights`: they are
    required."""
    config_file = config_file_of(path)
    try:
        raw = json.loads(config_file.read_text())
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
        with_rotated_share(config)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{config_file}: cannot be read: {error}") from error
    if head == "value" and config.model_type in WITH_IMAGES:
        # The import registers the class with transformers.
        import slime_fsdp.vision_value  # noqa: F401
    remote = "auto_map" in raw and trust_remote_code
    known = type(config) in AutoModelForCausalLM._model_mapping or config.model_type in WITH_IMAGES
    if not remote and not known:
        raise ModelError(f'{config_file}: transformers has no causal language model for "{config.model_type}".')
    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)
    # A config.json may lack the kinds of its layers: Qwen3-Next's has only an interval.
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if problems := layer_problems(config.model_type, kinds):
        raise ModelError(f"{config_file}: {problems[0]}")
    if getattr(kind, "_is_stateful", False) and config.model_type not in WITH_LINEAR_ATTENTION:
        raise ModelError(
            f'{config_file}: models of type "{config.model_type}" pass a state from token to token, which would continue from '
            "one packed sequence into the next: backend fsdp does not train them."
        )
    if not remote and head != "lm" and type(config) not in HEADS[head]._model_mapping:
        raise ModelError(
            f'{config_file}: transformers has no token classifier for "{config.model_type}", so no value head.'
        )
    if weights:
        check_weights(path)
    if head == "value":
        config.num_labels = 1
    return ModelFolder(path=path, head=head, config=config, trust_remote_code=trust_remote_code)
