"""Sample as old functions use it: a writable record, made from the kernel's sample and converted back by the plugins."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from slime_compat.response_metadata import EngineReply, KeptTokens, joined_experts, read_reply
from slime_core.types.prompt import Prompt
from slime_core.types.sample import Sample as KernelSample


class Status(Enum):
    """How generation ended, with upstream's values."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


STATUS_OF_FINISH = {"stop": Status.COMPLETED, "length": Status.TRUNCATED, "abort": Status.ABORTED}


@dataclass
class SpecInfo:
    """Counters of speculative decoding."""

    spec_accept_token_num: int = 0
    spec_draft_token_num: int = 0
    spec_verify_ct: int = 0
    completion_token_num: int = 0

    @property
    def spec_accept_rate(self) -> float:
        return self.spec_accept_token_num / self.spec_draft_token_num if self.spec_draft_token_num > 0 else 0.0

    @property
    def spec_accept_length(self) -> float:
        return self.completion_token_num / self.spec_verify_ct if self.spec_verify_ct > 0 else 0.0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        self.spec_accept_token_num += meta_info.get("spec_accept_token_num", 0)
        self.spec_draft_token_num += meta_info.get("spec_draft_token_num", 0)
        self.spec_verify_ct += meta_info.get("spec_verify_ct", 0)
        self.completion_token_num += meta_info.get("completion_tokens", 0)

    def to_dict(self) -> dict[str, int]:
        return {of.name: getattr(self, of.name) for of in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, int]) -> SpecInfo:
        return cls(**{of.name: data.get(of.name, 0) for of in fields(cls)})


@dataclass
class PrefixCacheInfo:
    """Counters of the engine's prefix cache, in tokens."""

    cached_tokens: int = 0
    total_prompt_tokens: int = 0

    @property
    def prefix_cache_hit_rate(self) -> float:
        return self.cached_tokens / self.total_prompt_tokens if self.total_prompt_tokens > 0 else 0.0

    def add(self, meta_info: Mapping[str, Any]) -> None:
        self.cached_tokens += meta_info.get("cached_tokens", 0)
        self.total_prompt_tokens += meta_info.get("prompt_tokens", 0)

    def to_dict(self) -> dict[str, int]:
        return {of.name: getattr(self, of.name) for of in fields(self)}

    @classmethod
    def from_dict(cls, data: Mapping[str, int]) -> PrefixCacheInfo:
        return cls(**{of.name: data.get(of.name, 0) for of in fields(cls)})


@dataclass
class Sample:
    """All attributes can be set. What becomes of them is in the README: a generate function's are trained, a reward's are
    ignored."""

    group_index: int | None = None
    index: int | None = None
    rollout_id: int | None = None
    """Equal for the parts of one trajectory."""
    prompt: Any = ""
    """The rendered text of the prompt; a list of messages if `apply_chat_template` is not set."""
    tokens: list[int] = field(default_factory=list)
    """Prompt and response; empty before generation."""
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None
    multimodal_train_input_id: str | None = None
    apply_chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    response: str = ""
    response_length: int = 0
    label: Any = None
    reward: Any = None
    """A number, or a dict of numbers."""
    loss_mask: list[int] | None = None
    """One number per response token; None: all 1."""
    weight_versions: list[str] = field(default_factory=list)
    rollout_log_probs: list[float] | None = None
    """One number per response token, nats."""
    rollout_top_p_token_ids: Any = None
    """int32 (K,), the kept ids of all response tokens, one token after the other."""
    rollout_top_p_token_offsets: Any = None
    """int32 (R + 1,), where each token's ids begin."""
    rollout_routed_experts: Any = None
    """int32 (F, layers, top_k), experts of the first F tokens."""
    remove_sample: bool = False
    teacher_log_probs: Any = None
    """One number per response token, nats."""
    status: Status = Status.PENDING
    metadata: dict[str, Any] = field(default_factory=dict)
    generate_function_path: str | None = None
    custom_rm_path: str | None = None
    train_metadata: dict[str, Any] | None = None
    session_id: str | None = None
    non_generation_time: float = 0.0
    """Seconds."""
    spec_info: SpecInfo = field(default_factory=SpecInfo)
    prefix_cache_info: PrefixCacheInfo = field(default_factory=PrefixCacheInfo)

    @property
    def effective_response_length(self) -> int:
        """Tokens of the response that are trained."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def get_reward_value(self, args: Any) -> Any:
        """The number that is trained on: in a dict, that of `args.reward_key`."""
        is_one_of_several = isinstance(self.reward, dict) and args.reward_key
        return self.reward[args.reward_key] if is_one_of_several else self.reward

    def to_dict(self) -> dict[str, Any]:
        """All attributes, also those that functions added; the status is its value."""
        nested = {"spec_info": self.spec_info.to_dict(), "prefix_cache_info": self.prefix_cache_info.to_dict()}
        return {**vars(self), "status": self.status.value, **nested}

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Sample:
        """The sample that `to_dict` wrote."""
        values = dict(data)
        values["status"] = Status(values["status"])
        values["spec_info"] = SpecInfo.from_dict(values.get("spec_info", {}))
        values["prefix_cache_info"] = PrefixCacheInfo.from_dict(values.get("prefix_cache_info", {}))
        known = cls.__dataclass_fields__
        sample = cls(**{name: value for name, value in values.items() if name in known})
        for name in values.keys() - known.keys():
            setattr(sample, name, values[name])
        return sample

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Any = None,
        log_probs: Any = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Appends tokens of a model (with log_probs, and meta_info of SGLang), or of a tool (`trainable` False).

        ValueError if the lengths do not fit. update_terminal_info: whether status, versions and counters follow meta_info."""
        added = [] if tokens is None else [int(token) for token in tokens]
        given = None if log_probs is None else [float(log_prob) for log_prob in log_probs]
        if given is not None and len(given) != len(added):
            raise ValueError(f"log_probs length {len(given)} != tokens length {len(added)}")
        if added and trainable and given is None:
            raise ValueError("trainable response tokens require rollout log probabilities.")
        if added and not trainable:
            if given is not None:
                raise ValueError("non-trainable response tokens should not pass rollout log probabilities.")
            given = [0.0] * len(added)
        if text is not None:
            self.response += text
        before = self.response_length
        if added:
            self.tokens += added
            self.response_length += len(added)
            if self.loss_mask is None:
                self.loss_mask = [1] * before
            # In place, as upstream: old functions keep the lists.
            self.loss_mask += [int(trainable)] * len(added)
        if given is not None:
            if self.rollout_log_probs is None:
                if trainable and before:
                    raise ValueError("cannot append log_probs: response tokens before them have no rollout_log_probs.")
                self.rollout_log_probs = [0.0] * before
            self.rollout_log_probs += given
        is_tool = bool(added) and not trainable
        if meta_info is not None or is_tool:
            reply = read_reply(meta_info or {}, len(added))
            self._keep_token_ids(reply, len(added), pad=is_tool)
            self._keep_experts(reply, args)
            if update_terminal_info and "finish_reason" in reply.meta:
                self._finish(reply.meta, args)
        self._check_lengths()

    def _keep_token_ids(self, reply: EngineReply, count: int, *, pad: bool) -> None:
        kept = KeptTokens.of(self.rollout_top_p_token_ids, self.rollout_top_p_token_offsets)
        if reply.kept is not None:
            kept = reply.kept if kept is None else kept.then(reply.kept)
        elif pad and kept is not None:
            kept = kept.padded(count)
        if kept is not None:
            self.rollout_top_p_token_ids, self.rollout_top_p_token_offsets = kept.ids, kept.offsets

    def _keep_experts(self, reply: EngineReply, args: Any) -> None:
        if reply.experts is not None:
            self.rollout_routed_experts = joined_experts(self.rollout_routed_experts, reply, len(self.tokens), args)

    def _finish(self, meta: Mapping[str, Any], args: Any) -> None:
        if getattr(args, "sglang_speculative_algorithm", False):
            self.spec_info.add(meta)
        self.prefix_cache_info.add(meta)
        if "weight_version" in meta:
            self.weight_versions.append(meta["weight_version"])
        self.status = STATUS_OF_FINISH.get(meta["finish_reason"]["type"], self.status)

    def _check_lengths(self) -> None:
        for name in ("loss_mask", "rollout_log_probs"):
            column = getattr(self, name)
            if column is not None and len(column) != self.response_length:
                raise ValueError(f"{name} length {len(column)} != response_length {self.response_length}")
        kept = KeptTokens.of(self.rollout_top_p_token_ids, self.rollout_top_p_token_offsets)
        if kept is not None and len(kept.offsets) != self.response_length + 1:
            raise ValueError(
                f"rollout_top_p_token_offsets length {len(kept.offsets)} != response_length + 1 = {self.response_length + 1}"
            )


# Old functions write Sample.Status.COMPLETED.
Sample.Status = Status  # type: ignore[attr-defined]
Sample.SpecInfo = SpecInfo  # type: ignore[attr-defined]
Sample.PrefixCacheInfo = PrefixCacheInfo  # type: ignore[attr-defined]


def old_prompt(prompt: Prompt, index: int) -> Sample:
    """A sample without a response."""
    return Sample(
        group_index=prompt.group_index,
        index=index,
        rollout_id=index,
        prompt=prompt.text,
        label=copy.deepcopy(prompt.label),
        metadata=copy.deepcopy(dict(prompt.metadata)),
    )


def old_sample(sample: KernelSample) -> Sample:
    """Converts the kernel's sample. Its reward is a dict if the reward had named numbers."""
    old = old_prompt(sample.prompt, sample.index)
    old.rollout_id = sample.rollout_id
    old.tokens = sample.tokens.tolist()
    old.response = sample.raw_response
    old.response_length = sample.response_length
    old.reward = dict(sample.reward_parts) or sample.reward
    old.loss_mask = sample.loss_mask.tolist()
    old.weight_versions = [str(span.version) for span in sample.spans]
    old.rollout_log_probs = sample.rollout_log_probs.tolist()
    old.remove_sample = sample.remove_sample
    old.status = Status(sample.status.value)
    old.metadata = copy.deepcopy(dict(sample.metadata))
    return old
