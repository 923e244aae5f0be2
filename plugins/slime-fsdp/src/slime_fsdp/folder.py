"""A Hugging Face folder: is it one that can be trained, and what does it hold."""

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
        """What config.json says of the weights on disk, most of them."""
        found = self.config.dtype
        return found if isinstance(found, torch.dtype) else torch.float32

    @cached_property
    def wide(self) -> frozenset[str]:
        """Of a folder in half precision the few tensors that it has in float32, as gates and biases of routers."""
        if self.dtype.itemsize >= torch.float32.itemsize:
            return frozenset()
        dtypes = dtypes_in(self.path)
        found = frozenset(name for name, dtype in dtypes.items() if dtype == torch.float32)
        # Else its config.json does not say what it is in.
        return found if 2 * len(found) < len(dtypes) else frozenset()

    @property
    def sees_images(self) -> bool:
        return self.config.model_type in WITH_IMAGES

    @property
    def auto_class(self) -> Any:
        """transformers' class for this head and model."""
        return AutoModelForImageTextToText if self.sees_images and self.head == "lm" else HEADS[self.head]

    def unknown(self, unexpected: Iterable[str]) -> list[str]:
        """Of the names that transformers did not expect, those that belong to nothing: neither to another head nor to layers of
        multi-token prediction behind the model's own. Code that came with the model may leave out what it likes."""
        if self.trust_remote_code and hasattr(self.config, "auto_map"):
            return []
        text = self.config.get_text_config()
        ahead = getattr(text, "num_nextn_predict_layers", None) or 0
        known = [f".layers.{text.num_hidden_layers + number}." for number in range(ahead)]
        if self.head == "value":
            known.append("lm_head.")
        return sorted(name for name in unexpected if not any(part in name for part in known))

    def attention(self, implementation: str) -> Any:
        """Packed attention is the language model's; patches attend by whole images, in transformers' own way."""
        if not self.sees_images:
            return implementation
        towers = {"": implementation, "text_config": implementation}
        return towers | {"vision_config": "sdpa" if implementation == PACKED else implementation}

    def empty_model(self, attn_implementation: str) -> PreTrainedModel:
        """On the meta device, float32."""
        with torch.device("meta"):
            model: PreTrainedModel = self.auto_class.from_config(
                # transformers writes the dtype that it is asked for into it.
                deepcopy(self.config),
                attn_implementation=self.attention(attn_implementation),
                dtype=torch.float32,
                trust_remote_code=self.trust_remote_code,
            )
        return model.eval()

    def load_model(self, attn_implementation: str, seed: int) -> PreTrainedModel:
        """With its weights, float32, on the CPU. A value head that the folder lacks starts from N(0, 1/(hidden + 1)),
        bias 0 (Stiennon et al. 2020, arXiv 2009.01325, appendix B.1)."""
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
                fresh_value_head(model.score, seed)
            missing -= fresh
        if missing:
            some = ", ".join(sorted(missing)[:3])
            raise ModelError(f"{self.path}: {len(missing)} weights are missing from its files, such as {some}.")
        if extra := self.unknown(info["unexpected_keys"]):
            raise ModelError(
                f"{self.path}: {len(extra)} tensors of its files are none of a {self.config.model_type} model's, such as "
                f"{', '.join(extra[:3])}. Training would lose them; is its config.json another model's?"
            )
        return model.eval()


@contextmanager
def expected_differences() -> Iterator[None]:
    """transformers warns that a language model's folder has another head; what is missing is looked at here."""
    logger = logging.getLogger("transformers.modeling_utils")
    level = logger.level
    logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        logger.setLevel(level)


def fresh_value_head(linear: torch.nn.Linear, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        linear.weight.normal_(0.0, (linear.in_features + 1) ** -0.5, generator=generator)
        if linear.bias is not None:
            linear.bias.zero_()


def open_folder(path: Path, *, head: str = "lm", trust_remote_code: bool = False, weights: bool = True) -> ModelFolder:
    """Raises ModelError for what transformers could not load, before any weight is read. `weights`: they must be there."""
    if not path.is_dir():
        raise ModelError(f"{path}: no such folder. Give a Hugging Face model folder (config.json, *.safetensors).")
    config_file = path / "config.json"
    if not config_file.is_file():
        raise ModelError(f"{path}: it has no config.json, so it is not a Hugging Face model folder.")
    try:
        raw = json.loads(config_file.read_text())
        config = AutoConfig.from_pretrained(path, trust_remote_code=trust_remote_code, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise ModelError(f"{config_file}: cannot be read: {error}") from error
    if head == "value" and config.model_type in WITH_IMAGES:
        # It registers itself with transformers.
        import slime_fsdp.vision_value  # noqa: F401
    remote = "auto_map" in raw and trust_remote_code
    known = type(config) in AutoModelForCausalLM._model_mapping or config.model_type in WITH_IMAGES
    if not remote and not known:
        raise ModelError(f'{config_file}: transformers has no causal language model for "{config.model_type}".')
    kind = AutoModelForCausalLM._model_mapping.get(type(config), None)
    # A config.json need not name the kinds of its layers: Qwen3-Next's gives only how many there are.
    kinds = getattr(config, "layer_types", None) or getattr(config, "layers_block_type", None)
    if problems := layer_problems(config.model_type, kinds):
        raise ModelError(f"{config_file}: {problems[0]}")
    if getattr(kind, "_is_stateful", False) and config.model_type not in WITH_LINEAR_ATTENTION:
        raise ModelError(
            f'{config_file}: models of type "{config.model_type}" hand a state from token to token, which would run on from '
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
