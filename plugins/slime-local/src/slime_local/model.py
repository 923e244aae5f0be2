"""The transformers model as the engine uses it: loaded, probed, and called for logits."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText, PreTrainedModel
from transformers.cache_utils import Cache

from slime_core.contracts.setup import EngineSetup
from slime_core.data.model_folder import read_model_config
from slime_core.errors import ModelError
from slime_local.attention import INVARIANT, NAME
from slime_local.config import LocalConfig
from slime_local.image_inputs import MODEL_TYPES
from slime_local.kv_cache import LayerShape, ProbeView
from slime_models.media.image_processor import ImageProcessor
from slime_training.adapters.engine import PromptLogProbs
from slime_training.alignment import align
from slime_training.batch_invariant.mode import InvariantKernels
from slime_training.batch_invariant.products import product_shapes, require_equal_rows
from slime_training.batch_invariant.sums import log_softmax as invariant_log_softmax
from slime_training.model_config import with_rotated_share
from slime_training.onednn import onednn_available, use_onednn

_LAYER_TYPES: Final = frozenset({"full_attention", "sliding_attention"})


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutModel:
    network: PreTrainedModel
    device: torch.device
    vocab_size: int
    stop_ids: frozenset[int]
    """End-of-sequence tokens of the generation config and of the model config."""
    layers: tuple[LayerShape, ...]
    images: ImageProcessor | None = None
    """None: it takes none."""
    true_on_policy: bool = False
    """Everything is computed with `slime_training.batch_invariant`."""

    @property
    def reads_only(self) -> bool:
        """A forward changes nothing in the model, so that threads may share it. Rotary positions that depend on the longest
        sequence so far do."""
        kinds = [getattr(module, "rope_type", "") for module in self.network.modules()]
        names = " ".join(str(kind) for kind in kinds)
        return not self.true_on_policy and "dynamic" not in names and "longrope" not in names

    @property
    def hidden_size(self) -> int:
        return int(self.network.get_input_embeddings().weight.shape[-1])

    def kernels(self) -> AbstractContextManager[object]:
        return InvariantKernels() if self.true_on_policy else nullcontext()

    def log_softmax(self, scaled_NV: Tensor) -> Tensor:
        return invariant_log_softmax(scaled_NV) if self.true_on_policy else scaled_NV.log_softmax(-1)

    def logits(self, ids: Tensor, positions: Tensor, mask: Tensor | None, cache: Cache) -> Tensor:
        """Logits of the last column, (B, V) float32. `ids`, `positions` (B, P) int64; see `attention.attend` for the mask."""
        with self.kernels():
            output = self.network(
                input_ids=ids,
                position_ids=positions,
                attention_mask=mask,
                past_key_values=cache,
                use_cache=True,
                logits_to_keep=1,
            )
        logits: Tensor = output.logits[:, -1].float()
        return logits

    @torch.inference_mode()
    def log_probs(self, tokens: npt.NDArray[np.int32], count: int) -> npt.NDArray[np.float32]:
        """(count,) of the last `count` tokens of one sequence, at temperature 1."""
        if not count:
            return np.empty(0, np.float32)
        ids = torch.from_numpy(np.ascontiguousarray(tokens, np.int64)).to(self.device)[None]
        positions = torch.arange(ids.shape[1], device=self.device)[None]
        with self.kernels():
            output = self.network(
                input_ids=ids,
                position_ids=positions,
                past_key_values=ProbeView(),
                use_cache=True,
                logits_to_keep=count + 1,
            )
            rows = output.logits[0, :-1].float()
            chosen = rows.gather(1, ids[0, -count:, None])[:, 0] - rows.logsumexp(-1)
        found: npt.NDArray[np.float32] = chosen.cpu().numpy()
        return found

    @torch.inference_mode()
    def prompt_log_probs(self, tokens: npt.NDArray[np.int32], top_k: int) -> PromptLogProbs:
        """Of one sequence of T >= 1 tokens."""
        if len(tokens) < 2:
            nothing = np.empty((0, top_k), np.float32)
            return PromptLogProbs(
                log_probs=np.empty(0, np.float32), top_ids=nothing.astype(np.int32), top_log_probs=nothing
            )
        ids = torch.from_numpy(np.ascontiguousarray(tokens, np.int64)).to(self.device)[None]
        positions = torch.arange(ids.shape[1], device=self.device)[None]
        with self.kernels():
            output = self.network(input_ids=ids, position_ids=positions, past_key_values=ProbeView(), use_cache=True)
            log_probs_TV = self.log_softmax(output.logits[0, :-1].float())
        chosen = log_probs_TV.gather(1, ids[0, 1:, None])[:, 0]
        top, top_ids = log_probs_TV.topk(top_k, dim=-1)
        return PromptLogProbs(
            log_probs=chosen.cpu().numpy(),
            top_ids=top_ids.to(torch.int32).cpu().numpy(),
            top_log_probs=top.cpu().numpy(),
        )


def load_model(config: LocalConfig, setup: EngineSetup) -> RolloutModel:
    """Raises ModelError for what the engine cannot decode: attention that is not transformers' own interface, layers
    that keep other state than keys and values, end-of-sequence ids outside the vocabulary; true on-policy what
    it has no batch-invariant kernels for."""
    if setup.device == "cuda" and not torch.cuda.is_available():
        raise ModelError(f"engine {setup.index}: device cuda was asked for, but torch sees no GPU here.")
    device = torch.device(setup.device)
    dtype = config.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device.type == "cuda" else "float32"
    sees_images = read_model_config(setup.model_path).get("model_type") in MODEL_TYPES
    attention: Any = INVARIANT if setup.true_on_policy else NAME
    if sees_images:
        # Patches attend by whole images, in transformers' own way.
        attention = {"": attention, "text_config": attention, "vision_config": "sdpa"}
    try:
        found = AutoConfig.from_pretrained(
            setup.model_path, trust_remote_code=setup.trust_remote_code, local_files_only=True
        )
        network = (AutoModelForImageTextToText if sees_images else AutoModelForCausalLM).from_pretrained(
            setup.model_path,
            config=with_rotated_share(found),
            dtype=dtype,
            attn_implementation=attention,
            trust_remote_code=setup.trust_remote_code,
            local_files_only=True,
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(f"{setup.model_path}: engine {setup.index} cannot load the weights: {error}") from error
    network = network.to(device).eval().requires_grad_(False)
    # The same weights give the same bits, whatever file they come from.
    align(network)
    kinds = set(getattr(network.config.get_text_config(), "layer_types", None) or ()) - _LAYER_TYPES
    if kinds:
        raise ModelError(
            f"{setup.model_path}: layers of type {', '.join(sorted(kinds))}; engine local decodes "
            f"{' and '.join(sorted(_LAYER_TYPES))} only. Use another engine for this model."
        )
    if setup.true_on_policy:
        _check_true_on_policy(config, network)
    elif _uses_onednn(config, network):
        use_onednn(network)
    vocab_size = network.get_input_embeddings().num_embeddings
    with InvariantKernels() if setup.true_on_policy else nullcontext():
        layers = _probe(network, device)
    return RolloutModel(
        network=network,
        device=device,
        vocab_size=vocab_size,
        stop_ids=_stop_ids(network, vocab_size),
        layers=layers,
        images=ImageProcessor(setup.model_path, trust_remote_code=setup.trust_remote_code) if sees_images else None,
        true_on_policy=setup.true_on_policy,
    )


def _check_true_on_policy(config: LocalConfig, network: PreTrainedModel) -> None:
    if config.linear == "onednn":
        raise ModelError('engine.linear = "onednn": true_on_policy_mode has its own products. Use linear = "auto".')
    require_equal_rows(product_shapes(network), network.dtype, network.device)


def _uses_onednn(config: LocalConfig, network: PreTrainedModel) -> bool:
    fits = network.device.type == "cpu" and network.dtype == torch.float32
    if config.linear == "onednn" and not (fits and onednn_available()):
        raise ModelError(
            f'engine.linear = "onednn": needs a CPU, float32 and a torch with oneDNN; here {network.device.type}, '
            f"{str(network.dtype).removeprefix('torch.')}, oneDNN {'present' if onednn_available() else 'absent'}. "
            'Use linear = "auto".'
        )
    return config.linear != "torch" and fits and onednn_available()


def _stop_ids(network: PreTrainedModel, vocab_size: int) -> frozenset[int]:
    found: set[int] = set()
    for source in (network.generation_config, network.config):
        ids = getattr(source, "eos_token_id", None)
        found.update([] if ids is None else [ids] if isinstance(ids, int) else ids)
    outside = sorted(token for token in found if not 0 <= token < vocab_size)
    if outside:
        raise ModelError(
            f"{network.config.name_or_path}: eos_token_id {outside} is outside the vocabulary of {vocab_size}; "
            "correct config.json and generation_config.json."
        )
    return frozenset(found)


@torch.inference_mode()
def _probe(network: PreTrainedModel, device: torch.device) -> tuple[LayerShape, ...]:
    """One token through the model: which layers keep keys and values, and of what shape."""
    cache = ProbeView()
    one = torch.zeros((1, 1), dtype=torch.int64, device=device)
    network(input_ids=one, position_ids=one, past_key_values=cache, use_cache=True, logits_to_keep=1)
    layers = cache.layers_seen
    expected = network.config.get_text_config().num_hidden_layers
    if not network.is_backend_compatible() or sorted(layers) != list(range(expected)):
        raise ModelError(
            f"{network.config.name_or_path}: {type(network).__name__} does not keep keys and values in transformers' "
            "cache and attention interfaces in every layer. Use another engine for this model."
        )
    return tuple(layers[index] for index in sorted(layers))
