"""What SGLang reports about a response beside its tokens: the ids that top-p kept, and the chosen experts."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import torch
from torch import Tensor

KEPT_IDS: Final = ("top_p_token_ids", "top_p_kept_token_ids")
KEPT_OFFSETS: Final = ("top_p_token_offsets", "top_p_kept_token_offsets")


def decode_int32_meta_array(meta: Mapping[str, Any], keys: str | Sequence[str]) -> Tensor | None:
    """int32 (N,), the first of these keys that is there; text is base64 of the bytes."""
    keys = (keys,) if isinstance(keys, str) else keys
    value = next((meta[key] for key in keys if key in meta), None)
    if value is None:
        return None
    if isinstance(value, str):
        value = base64.b64decode(value.encode("ascii"))
    if isinstance(value, bytes | bytearray | memoryview):
        return torch.frombuffer(bytearray(value), dtype=torch.int32)
    return int32_tensor(value)


def int32_tensor(value: Any) -> Tensor:
    """int32 (N,) on the CPU, with memory of its own."""
    return torch.tensor(value.tolist() if hasattr(value, "tolist") else value, dtype=torch.int32).reshape(-1)


@dataclass(frozen=True, slots=True, eq=False)
class KeptTokens:
    """The ids that top-p kept for each of R tokens: `ids` (K,), and `offsets` (R + 1,) where each token's begin."""

    ids: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, ids: Any, offsets: Any) -> KeptTokens | None:
        """ValueError if one of them is missing, or they do not fit."""
        if ids is None and offsets is None:
            return None
        if ids is None or offsets is None:
            raise ValueError("top-p token replay must include both token ids and offsets.")
        kept = cls(int32_tensor(ids), int32_tensor(offsets))
        if not len(kept.offsets) or int(kept.offsets[0]) != 0 or int(kept.offsets[-1]) != len(kept.ids):
            ends = kept.offsets[[0, -1]].tolist() if len(kept.offsets) else []
            raise ValueError(f"top-p token offsets must go from 0 to {len(kept.ids)}, the number of ids; got {ends}.")
        return kept

    def then(self, other: KeptTokens) -> KeptTokens:
        return KeptTokens(
            torch.cat([self.ids, other.ids]), torch.cat([self.offsets, other.offsets[1:] + self.offsets[-1]])
        )

    def padded(self, count: int) -> KeptTokens:
        """With `count` more tokens, for which nothing was kept."""
        return KeptTokens(self.ids, torch.cat([self.offsets, self.offsets[-1:].expand(count)]))


@dataclass(frozen=True, slots=True, eq=False)
class EngineReply:
    meta: Mapping[str, Any]
    kept: KeptTokens | None
    experts: Tensor | None
    """int32 (F x layers x top_k,)"""


def read_reply(meta: Mapping[str, Any], count: int) -> EngineReply:
    """count: tokens of this reply. ValueError if its kept ids are of another number of tokens."""
    kept = None
    if count:
        kept = KeptTokens.of(decode_int32_meta_array(meta, KEPT_IDS), decode_int32_meta_array(meta, KEPT_OFFSETS))
        if kept is not None and len(kept.offsets) != count + 1:
            raise ValueError(f"top-p token offsets are of {len(kept.offsets) - 1} tokens, but {count} were generated.")
    return EngineReply(meta, kept, decode_int32_meta_array(meta, "routed_experts"))


def joined_experts(existing: Any, reply: EngineReply, num_tokens: int, args: Any) -> Tensor:
    """int32 (F, layers, top_k): those before the reply, then the reply's. ValueError if they do not fit the sample's tokens."""
    if args is None:
        raise ValueError("args is required to decode routed experts metadata.")
    assert reply.experts is not None
    start = int(reply.meta.get("routed_experts_start_len", 0) or 0)
    shape = (max(0, num_tokens - 1 - start), args.num_layers, args.moe_router_topk)
    if start < 0 or reply.experts.numel() != shape[0] * shape[1] * shape[2]:
        raise ValueError(
            f"routed experts: {reply.experts.numel()} numbers from token {start}, but a sample of {num_tokens} tokens needs "
            f"{shape[0]} x {shape[1]} layers x {shape[2]} experts."
        )
    added = reply.experts.reshape(shape)
    if start == 0:
        return added
    if existing is None or len(existing) < start:
        there = 0 if existing is None else len(existing)
        raise ValueError(f"routed experts start at token {start}, but the sample has those of {there} tokens.")
    return torch.cat([torch.as_tensor(existing, dtype=torch.int32)[:start], added])
