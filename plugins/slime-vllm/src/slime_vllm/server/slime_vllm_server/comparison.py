"""Comparison: whether a model holds the weights that are sent to it once more.

vLLM's reload by layers makes each layer again, from what was sent, and copies it to where the old one was. Here the old one is
set aside meanwhile, compared, and put back: nothing that serves is written. So it compares what vLLM's kernels read, also where
vLLM has rearranged it, and for models whose weights are otherwise written in place.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Final

import torch
from torch import Tensor, nn
from vllm.model_executor.layers.attention import is_deferred_attention_layer
from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload
from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info
from vllm.model_executor.model_loader.reload.utils import get_tensor_load_numel

from slime_vllm_server.held_layer import Difference, HeldLayer
from slime_vllm_server.sources import Sources

LISTED: Final = 5


class Comparison:
    """Call `load` with all tensors of a version, some at a time, then `finish`. After an error, and after `close`, which ends
    it early, the model is as it was."""

    def __init__(self, model: nn.Module, model_config: Any) -> None:
        self._model, self._model_config = model, model_config
        self._sources = Sources()
        # Attention layers have no parameters after loading; what latent attention derives from others' is not compared.
        self._held = [
            HeldLayer(name, layer)
            for name, layer in model.named_modules()
            if any(value is not None for value in layer._parameters.values()) and not is_deferred_attention_layer(layer)
        ]
        self._loaded: dict[str, dict[str, Tensor]] = {}
        """Parameters as a checkpoint has them, by layer."""
        self._waiting = list(self._held)
        self._reached: set[int] = set()
        """Storages of the parameters that were compared."""
        self._unreached: list[tuple[HeldLayer, str]] = []
        self._problems: list[str] = []
        initialize_layerwise_reload(model)
        for held in self._held:
            self._set_aside(held)

    def _set_aside(self, held: HeldLayer) -> None:
        # Without them vLLM does not copy a new layer to where the old one was.
        get_layerwise_info(held.layer).kernel_tensors = None
        for key, value in held.layer._parameters.items():
            if value is not None and not value.is_meta:
                # vLLM leaves biases where they are, and loads over them.
                apart = torch.empty_like(value.data)
                apart.__class__ = value.__class__
                apart.__dict__ = value.__dict__.copy()
                held.layer._parameters[key] = apart
        shown = {key: value for key, value in held.layer._parameters.items() if value is not None}
        self._loaded[held.name] = shown
        for value in shown.values():
            self._sources.watch(value)

    def load(self, named: Iterable[tuple[str, Tensor]], loaded: Callable[[Iterable[tuple[str, Tensor]]], None]) -> None:
        """`loaded`: the model's loader."""
        with contextlib.ExitStack() as failed:
            failed.callback(self.close)
            with self._sources:
                loaded(self._followed(named))
            self._compare_complete()
            failed.pop_all()

    def _followed(self, named: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        for name, tensor in named:
            self._sources.sent = name
            yield name, tensor

    def _compare_complete(self) -> None:
        complete = [held for held in self._waiting if not get_layerwise_info(held.layer).can_load()]
        for held in complete:
            self._compare(held, loaded=True)
            held.restore()
        self._waiting = [held for held in self._waiting if held not in complete]

    def finish(self) -> None:
        """Raises ValueError with what differs, and with what was not sent."""
        with contextlib.ExitStack() as ending:
            ending.callback(self.close)
            for held in self._waiting:
                if get_layerwise_info(held.layer).load_numel <= 0:
                    self._compare(held, loaded=False)
                    get_layerwise_info(held.layer).reset()
            # Layers with padding are not complete for vLLM before.
            late = [held for held in self._waiting if get_layerwise_info(held.layer).can_load()]
            finalize_layerwise_reload(self._model, self._model_config)
            for held in late:
                self._compare(held, loaded=True)
        self._problems += [problem for held, problem in self._unreached if not self._is_another(held)]
        if self._problems:
            more = f"; and {len(self._problems) - LISTED} more" if len(self._problems) > LISTED else ""
            raise ValueError(
                f"the weights that it holds are not those that were sent again: {'; '.join(self._problems[:LISTED])}{more}"
            )

    def close(self) -> None:
        for held in self._waiting:
            get_layerwise_info(held.layer).reset()
        finalize_layerwise_reload(self._model, self._model_config)
        for held in self._waiting:
            held.restore()
        self._waiting = []

    def _compare(self, held: HeldLayer, *, loaded: bool) -> None:
        """`loaded`: the layer got some tensor."""
        shown, whole = self._loaded.pop(held.name), loaded
        for key, value in shown.items():
            written, required = self._sources.num_written(value), get_tensor_load_numel(value)
            if not loaded:
                # Of a vocabulary a rank may hold nothing but padding, which loaders fill.
                if written < required:
                    self._unreached.append((held, f"{held.name}.{key} was not sent"))
            elif written < required:
                names = ", ".join(self._sources.names(value)) or "no tensor"
                self._problems.append(f"of {held.name}.{key} only {written} of {required} elements were sent ({names})")
                whole = False
        if whole:
            shapes = {key: value.shape for key, value in shown.items()}
            self._problems += [self._described(held, found, shown) for found in held.differences(shapes)]
            self._reached.update(value.untyped_storage()._cdata for value in held.parameters.values() if value.numel())
        for value in shown.values():
            self._sources.forget(value)

    def _is_another(self, held: HeldLayer) -> bool:
        """Whether the kernels read only parameters of another layer, which were compared: a tied head, except on a CPU."""
        own = held.parameters.values()
        return held.product is None and all(value.untyped_storage()._cdata in self._reached for value in own)

    def _described(self, held: HeldLayer, difference: Difference, shown: dict[str, Tensor]) -> str:
        own = f"{held.name}.{difference.parameter}"
        if difference.index is None:
            return f"{own} is {difference.held}, and {difference.sent} after loading"
        place = f"{own}{list(difference.index)}"
        loaded = shown.get(difference.parameter)
        # A parameter that vLLM has rearranged has other indices than a checkpoint's.
        if loaded is None or not (difference.packed or loaded.shape == held.parameters[difference.parameter].shape):
            sent = None
        else:
            sent = self._sources.name_at(loaded, difference.index)
        named = place if sent is None or sent == own else f"{sent} ({place})"
        return f"{named} is {difference.held}, and was sent as {difference.sent}"
