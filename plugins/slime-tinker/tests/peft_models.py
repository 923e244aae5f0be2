"""Models by transformers and peft alone: what the server needs, with nothing of slime in it. One thread, no batches."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from slime_tinker.models import AdamSettings, BaseModel, ModelSpec, PromptScores
from torch import Tensor
from transformers import AutoModelForCausalLM

from slime_core.types.batch import Float32
from slime_core.types.completion import Completion, FinishReason, SamplingParams
from slime_session import Datum


class Weights:
    def __init__(self, model: Any) -> None:
        self.model = model

    def drop(self) -> None:
        self.model = None


class One:
    """A model with its optimizer."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1.0)


class PeftModels:
    whole = False
    max_models = 8
    max_weights = 4

    def __init__(self, folder: Path, name: str) -> None:
        torch.set_num_threads(1)
        self._base = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        config = self._base.config
        self.base = BaseModel(
            name=name,
            folder=folder,
            arch=config.model_type,
            vocab_size=config.vocab_size,
            max_length=config.max_position_embeddings,
        )
        self._models: dict[str, One] = {}
        self._sampler = ThreadPoolExecutor(1, "sampler")

    def create(self, name: str, spec: ModelSpec) -> None:
        torch.manual_seed(spec.seed)
        chosen = ["q_proj", "k_proj", "v_proj", "o_proj"] if spec.attention else []
        chosen += ["gate_proj", "up_proj", "down_proj"] if spec.mlp else []
        chosen += ["lm_head"] if spec.unembedding else []
        lora = LoraConfig(r=spec.rank or 1, lora_alpha=32, target_modules=chosen)
        self._models[name] = One(get_peft_model(copy.deepcopy(self._base), lora).eval())

    def load(self, name: str, spec: ModelSpec, folder: Path, *, optimizer: bool) -> None:
        self.create(name, spec)
        state = torch.load(folder / "state.pt", weights_only=False)
        self._models[name].model.load_state_dict(state["model"])
        if optimizer:
            self._models[name].optimizer.load_state_dict(state["optimizer"])

    def remove(self, name: str) -> None:
        del self._models[name]

    def forward(self, name: str, datums: Sequence[Datum]) -> Float32:
        with torch.no_grad():
            rows = [log_probs_of(self._models[name].model, datum) for datum in datums]
        return torch.cat(rows).numpy()

    def forward_backward(self, name: str, datums: Sequence[Datum], loss: Any) -> Float32:
        found = []
        for datum in datums:
            log_probs = log_probs_of(self._models[name].model, datum)
            weighted = loss_of(loss, log_probs, datum) * tensor(datum.loss_weights)
            torch.where(tensor(datum.mask) > 0, weighted, 0.0).sum().backward()
            found.append(log_probs.detach())
        return torch.cat(found).numpy()

    def optim_step(self, name: str, adam: AdamSettings) -> float:
        one = self._models[name]
        parameters = [p for p in one.model.parameters() if p.grad is not None]
        norm = torch.nn.utils.clip_grad_norm_(parameters, adam.grad_clip or float("inf"))
        for group in one.optimizer.param_groups:
            group.update(lr=adam.lr, betas=adam.betas, eps=adam.eps, weight_decay=adam.weight_decay)
        one.optimizer.step()
        one.optimizer.zero_grad()
        return float(norm)

    def save(self, name: str, folder: Path, *, optimizer: bool) -> None:
        folder.mkdir()
        one = self._models[name]
        state = {"model": one.model.state_dict(), "optimizer": one.optimizer.state_dict() if optimizer else None}
        torch.save({**state, "peft": one.model.peft_config["default"]}, folder / "state.pt")

    def open_weights(self, folder: Path) -> Weights:
        state = torch.load(folder / "state.pt", weights_only=False)
        model = get_peft_model(copy.deepcopy(self._base), state["peft"])
        model.load_state_dict(state["model"])
        return Weights(model.merge_and_unload().eval())

    def start_sampling(
        self, weights: Weights | None, prompt: Sequence[int], sampling: SamplingParams, seeds: Sequence[int]
    ) -> Future[list[Completion]]:
        model = self._base if weights is None else weights.model
        return self._sampler.submit(self._sample, model, list(prompt), sampling, list(seeds))

    @torch.no_grad()
    def _sample(self, model: Any, prompt: list[int], sampling: SamplingParams, seeds: list[int]) -> list[Completion]:
        stops = {self._base.config.eos_token_id, *sampling.stop_token_ids}
        generators = [torch.Generator().manual_seed(seed) for seed in seeds]
        tokens: list[list[int]] = [[] for _ in seeds]
        log_probs: list[list[float]] = [[] for _ in seeds]
        output = model(torch.tensor([prompt] * len(seeds)), use_cache=True)
        for _ in range(sampling.max_new_tokens):
            logits = output.logits[:, -1].float()
            rows = (logits / sampling.temperature if sampling.temperature else logits).log_softmax(-1)
            drawn = [int(torch.multinomial(row.exp(), 1, generator=g)) for row, g in zip(rows, generators, strict=True)]
            if not sampling.temperature:
                drawn = rows.argmax(-1).tolist()
            for place, token in enumerate(drawn):
                if not tokens[place] or tokens[place][-1] not in stops:
                    tokens[place].append(token)
                    log_probs[place].append(float(rows[place, token]))
            if all(own[-1] in stops for own in tokens):
                break
            output = model(torch.tensor(drawn)[:, None], past_key_values=output.past_key_values, use_cache=True)
        return [
            Completion(
                request_id="",
                token_ids=np.asarray(own, np.int32),
                log_probs=np.asarray(values, np.float32),
                finish_reason=FinishReason.STOP if own[-1] in stops else FinishReason.LENGTH,
                spans=(),
            )
            for own, values in zip(tokens, log_probs, strict=True)
        ]

    def prompt_scores(self, weights: Weights | None, prompt: Sequence[int], top_k: int) -> Future[PromptScores]:
        model = self._base if weights is None else weights.model
        return self._sampler.submit(self._scores, model, list(prompt), top_k)

    @torch.no_grad()
    def _scores(self, model: Any, prompt: list[int], top_k: int) -> PromptScores:
        rows = model(torch.tensor([prompt])).logits[0, :-1].float().log_softmax(-1)
        own = rows.gather(1, torch.tensor(prompt[1:])[:, None])[:, 0].numpy()
        if not top_k:
            return PromptScores(log_probs=own)
        top = rows.topk(top_k)
        return PromptScores(
            log_probs=own, top_ids=top.indices.numpy().astype(np.int32), top_log_probs=top.values.numpy()
        )

    def close(self) -> None:
        self._sampler.shutdown()


def tensor(values: Any) -> Tensor:
    return torch.as_tensor(np.asarray(values))


def log_probs_of(model: Any, datum: Datum) -> Tensor:
    """(R,)"""
    tokens = torch.tensor(np.asarray(datum.tokens), dtype=torch.int64)
    rows = model(tokens[None, :-1]).logits[0].float().log_softmax(-1)
    return rows.gather(1, tokens[1:, None])[datum.prompt_length - 1 :, 0]


def loss_of(loss: Any, log_probs: Tensor, datum: Datum) -> Tensor:
    """(R,) by the published formulas."""
    name = loss["name"]
    if name == "sft":
        return -log_probs
    old, advantages = tensor(datum.log_probs), tensor(datum.advantages)
    ratio = (log_probs - old).exp()
    if name == "importance_sampling":
        return -ratio * advantages
    if name == "dro":
        return -(log_probs * advantages - 0.5 * loss["beta"] * (log_probs - old) ** 2)
    low, high = 1 - loss["eps_clip"], 1 + loss["eps_clip_high"]
    if name == "clip":
        return -torch.minimum(ratio * advantages, ratio.clamp(low, high) * advantages)
    if name == "cispo":
        return -ratio.clamp(low, high).detach() * log_probs * advantages
    assert name == "sequence_clip"
    mean = (log_probs.detach() - old)[tensor(datum.mask) > 0].mean()
    of_sequence = (mean + log_probs - log_probs.detach()).exp()
    return -torch.minimum(of_sequence * advantages, of_sequence.clamp(low, high) * advantages)
