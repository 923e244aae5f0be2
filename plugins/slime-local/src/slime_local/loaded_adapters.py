"""LoadedAdapters: the adapters that requests may name. Each has a decoder of its own over the one model, and they take turns:
what is sampled with one does not depend on the requests of others, as long as keys and values of all fit `kv_cache_bytes`."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from torch import nn

from slime_core.errors import EngineRefused, ModelError
from slime_core.types.weights import Bucket
from slime_local.decoder import Decoder
from slime_local.model import RolloutModel
from slime_local.request_row import RequestRow
from slime_training.adapters.folder import low_rank_of, require_fit
from slime_training.adapters.low_rank import LowRank, LowRankLayers
from slime_training.bucket_order import BucketOrder
from slime_training.bucket_tensors import tensors_of


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LoadedAdapter:
    low_rank: LowRank
    decoder: Decoder


class LoadedAdapters:
    def __init__(self, model: RolloutModel, new_decoder: Callable[[], Decoder], *, most: int, engine: str) -> None:
        """`engine`: its name in messages."""
        self._model = model
        self._new_decoder = new_decoder
        self._most = most
        self._engine = engine
        self._layers = LowRankLayers(model.network)
        self._loaded: dict[str, LoadedAdapter] = {}

    def load(self, name: str, scale: float, bucket: Bucket) -> None:
        """Raises EngineRefused for what `AdapterEngine.load_adapter` names, EngineError for lost bytes."""
        where = f"{self._engine}, adapter {name}"
        if not self._most:
            raise EngineRefused(f"{where}: it is started without adapters. Set engine.max_adapters.")
        if name in self._loaded:
            raise EngineRefused(f"{where}: the name is in use.")
        if len(self._loaded) >= self._most:
            raise EngineRefused(
                f"{where}: it holds {self._most} already. Drop one, or set a larger engine.max_adapters."
            )
        BucketOrder(where).expect(bucket)
        device, dtype = self._model.device, self._model.network.dtype
        tensors = {tensor: value.to(device, dtype) for tensor, value in tensors_of(bucket)}
        linear = {layer: one for layer, one in self._model.network.named_modules() if type(one) is nn.Linear}
        try:
            low_rank = low_rank_of(tensors, scale, where)
            require_fit(low_rank, {layer: (one.out_features, one.in_features) for layer, one in linear.items()}, where)
        except ModelError as error:
            raise EngineRefused(str(error)) from error
        self._layers.prepare(low_rank)
        self._loaded[name] = LoadedAdapter(low_rank=low_rank, decoder=self._new_decoder())

    def drop(self, name: str) -> None:
        if (loaded := self._loaded.pop(name, None)) is not None:
            loaded.decoder.end(lambda row: True)

    def decoder(self, name: str) -> Decoder:
        return self._named(name).decoder

    def decoders(self) -> Iterator[Decoder]:
        return (loaded.decoder for loaded in self._loaded.values())

    @property
    def busy(self) -> bool:
        return any(decoder.busy for decoder in self.decoders())

    def end(self, chosen: Callable[[RequestRow], bool]) -> None:
        """See `Decoder.end`."""
        for decoder in self.decoders():
            decoder.end(chosen)
            if not decoder.busy:
                # As after its last step: keys and values are for others now.
                decoder.release()

    def turns(self) -> Iterator[Callable[[], None]]:
        """A decode step of every adapter that has requests."""
        for loaded in tuple(self._loaded.values()):
            if loaded.decoder.busy:
                yield partial(self._step, loaded)

    def using(self, name: str | None) -> LowRank | None:
        return None if name is None else self._named(name).low_rank

    @property
    def layers(self) -> LowRankLayers:
        return self._layers

    def _named(self, name: str) -> LoadedAdapter:
        if name not in self._loaded:
            there = ", ".join(sorted(self._loaded)[:8]) or "none"
            raise EngineRefused(f'{self._engine}: adapter "{name}" is not loaded. Loaded: {there}.')
        return self._loaded[name]

    def _step(self, loaded: LoadedAdapter) -> None:
        with self._layers.using(loaded.low_rank):
            loaded.decoder.step()
        if not loaded.decoder.busy:
            # Keys and values are for others now.
            loaded.decoder.release()
