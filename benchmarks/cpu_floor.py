"""The arithmetic of a GRPO step in bare torch: how fast a step on a CPU can be without any trainer around it.

python cpu_floor.py SETTINGS.json RESULT.json [ROUNDS]

For trl_cpu.py (`--floor`), or by hand with the settings that it writes. A step samples as many responses of as many tokens
as the other two sides (all of the mean length, so that no row ends early), takes rewards from nowhere, and makes the same
number of forward and backward passes and optimizer steps. What both sides do beside that is left out: no requests, no text, no
rewards, no stop tokens, no metrics, no weights that are copied. Rows are sampled in as many threads as the machine has, each
on its own share; prompts are computed once for all their responses, in sampling and in training.

Qwen3's layers are written out with torch's operators. Linear layers are slime's, which were the fastest of what there is.

Legend: B rows, P prompt tokens, R response tokens, L = P + R - 1 tokens that are read, G responses of a prompt; H heads, K key
heads, D head size.
"""

from __future__ import annotations

import json
import resource
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer

from slime_training.onednn import _Linear, _product

CHUNK = 512
"""Rows of a decoding pass."""


def linear(x: Tensor, weight: Tensor) -> Tensor:
    y: Tensor = _Linear.apply(x, weight, None) if torch.is_grad_enabled() else _product(x, weight)
    return y


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """(.., H, D), with cos and sin (.., 1, D)."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat((-high, low), -1) * sin


@dataclass(frozen=True, kw_only=True)
class Floor:
    weights: dict[str, Tensor]
    layers: int
    heads: int
    key_heads: int
    size: int
    eps: float
    cos: Tensor
    """(positions, 1, D)."""
    sin: Tensor

    def projected(self, x: Tensor, layer: str, places: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """(.., hidden) to queries (.., H, D), keys and values (.., K, D)."""
        w, shape = self.weights, x.shape[:-1]
        q = linear(x, w[f"{layer}.self_attn.q_proj.weight"]).view(*shape, self.heads, self.size)
        k = linear(x, w[f"{layer}.self_attn.k_proj.weight"]).view(*shape, self.key_heads, self.size)
        v = linear(x, w[f"{layer}.self_attn.v_proj.weight"]).view(*shape, self.key_heads, self.size)
        q, k = (
            rotated(
                rms_norm(x, w[f"{layer}.self_attn.{name}_norm.weight"], self.eps), self.cos[places], self.sin[places]
            )
            for x, name in ((q, "q"), (k, "k"))
        )
        return q, k, v

    def rest(self, x: Tensor, attended: Tensor, layer: str) -> Tensor:
        w = self.weights
        x = x + linear(attended.flatten(-2), w[f"{layer}.self_attn.o_proj.weight"])
        y = rms_norm(x, w[f"{layer}.post_attention_layernorm.weight"], self.eps)
        gate, up = (linear(y, w[f"{layer}.mlp.{name}_proj.weight"]) for name in ("gate", "up"))
        return x + linear(F.silu(gate) * up, w[f"{layer}.mlp.down_proj.weight"])

    def before(self, x: Tensor, layer: str) -> Tensor:
        return rms_norm(x, self.weights[f"{layer}.input_layernorm.weight"], self.eps)

    def logits(self, x: Tensor) -> Tensor:
        return F.linear(
            rms_norm(x, self.weights["model.norm.weight"], self.eps), self.weights["model.embed_tokens.weight"]
        )

    # ---------------------------------------------------------------- sampling

    @torch.inference_mode()
    def sample(self, prompts: Tensor, copies: int, count: int) -> tuple[Tensor, Tensor]:
        """Prompts (B, P) to tokens and log-probs, (B copies, count)."""
        torch.set_num_threads(1)
        rows, length = prompts.shape[0] * copies, prompts.shape[1]
        cache = [torch.empty(2, rows, self.key_heads, length + count, self.size) for _ in range(self.layers)]
        x = F.embedding(prompts, self.weights["model.embed_tokens.weight"])
        places = torch.arange(length)
        for number in range(self.layers):
            layer = f"model.layers.{number}"
            q, k, v = self.projected(self.before(x, layer), layer, places)
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            for kind, part in enumerate((k, v)):
                cache[number][kind, :, :, :length].view(len(prompts), copies, *part.shape[1:]).copy_(part[:, None])
            out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = self.rest(x, out.transpose(1, 2), layer)
        logits = self.logits(x[:, -1]).repeat_interleave(copies, 0)
        tokens, log_probs = torch.empty(rows, count, dtype=torch.int64), torch.empty(rows, count)
        for step in range(count):
            log_p = logits.log_softmax(-1)
            cumulative = log_p.exp().cumsum(-1)
            chosen = torch.searchsorted(cumulative, torch.rand(rows, 1) * cumulative[:, -1:]).clamp_(
                max=log_p.shape[1] - 1
            )
            tokens[:, step], log_probs[:, step] = chosen[:, 0], log_p.gather(1, chosen)[:, 0]
            if step < count - 1:
                logits = self._next(chosen[:, 0], length + step, cache)
        return tokens, log_probs

    def _next(self, tokens: Tensor, place: int, cache: list[Tensor]) -> Tensor:
        x = F.embedding(tokens, self.weights["model.embed_tokens.weight"])
        for number in range(self.layers):
            layer = f"model.layers.{number}"
            q, k, v = self.projected(self.before(x, layer), layer, torch.tensor(place))
            cache[number][0, :, :, place], cache[number][1, :, :, place] = k, v
            keys, values = cache[number][:, :, :, : place + 1]
            grouped = q.view(len(x), self.key_heads, -1, self.size) * self.size**-0.5
            scores = grouped @ keys.transpose(2, 3)
            weights = (scores - scores.amax(-1, keepdim=True)).exp_()
            weights /= weights.sum(-1, keepdim=True)
            x = self.rest(x, (weights @ values).view(len(x), self.heads, self.size), layer)
        return self.logits(x)

    # ---------------------------------------------------------------- training

    def log_probs(self, prompts: Tensor, responses: Tensor) -> Tensor:
        """Prompts (B, P), responses (B, G, R) to (B, G, R): each prompt is read once."""
        (size, length), (copies, count) = prompts.shape, responses.shape[1:]
        ids = torch.cat([prompts, responses[:, :, :-1].flatten(1)], 1)
        places = torch.cat([torch.arange(length), torch.arange(length, length + count - 1).repeat(copies)])
        x = F.embedding(ids, self.weights["model.embed_tokens.weight"])
        seen = torch.ones(count - 1, length + count - 1, dtype=torch.bool).tril(length)
        for number in range(self.layers):
            layer = f"model.layers.{number}"
            q, k, v = self.projected(self.before(x, layer), layer, places)
            of_prompt = F.scaled_dot_product_attention(
                *(part[:, :length].transpose(1, 2) for part in (q, k, v)), is_causal=True, enable_gqa=True
            ).transpose(1, 2)
            own = [part[:, length:].unflatten(1, (copies, count - 1)) for part in (q, k, v)]
            shared = [part[:, None, :length].expand(-1, copies, -1, -1, -1) for part in (k, v)]
            key, value = (
                torch.cat(both, 2).flatten(0, 1).transpose(1, 2) for both in zip(shared, own[1:], strict=True)
            )
            grouped = own[0].flatten(0, 1).transpose(1, 2).unflatten(1, (self.key_heads, -1)).flatten(2, 3)
            scores = (grouped * self.size**-0.5) @ key.transpose(2, 3)
            scores = scores.masked_fill(~seen.repeat(self.heads // self.key_heads, 1), -torch.inf)
            out = (scores.softmax(-1) @ value).unflatten(2, (-1, count - 1)).flatten(1, 2).transpose(1, 2)
            attended = torch.cat([of_prompt, out.reshape(size, -1, self.heads, self.size)], 1)
            x = self.rest(x, attended, layer)
        first = x[:, None, length - 1 : length].expand(-1, copies, -1, -1)
        hidden = torch.cat([first, x[:, length:].unflatten(1, (copies, count - 1))], 2)
        logits = self.logits(hidden)
        return logits.gather(-1, responses[..., None])[..., 0] - logits.logsumexp(-1)


def opened(settings: dict[str, Any]) -> Floor:
    model = AutoModelForCausalLM.from_pretrained(settings["hf_checkpoint"], dtype=torch.float32)
    config = model.config
    size = config.head_dim
    turns = torch.arange(1024)[:, None] / config.rope_parameters["rope_theta"] ** (torch.arange(0, size, 2) / size)
    angles = torch.cat((turns, turns), -1)[:, None]
    return Floor(
        weights={name: parameter.detach().clone().requires_grad_() for name, parameter in model.named_parameters()},
        layers=config.num_hidden_layers,
        heads=config.num_attention_heads,
        key_heads=config.num_key_value_heads,
        size=size,
        eps=config.rms_norm_eps,
        cos=angles.cos(),
        sin=angles.sin(),
    )


def one_step(
    floor: Floor,
    optimizer: torch.optim.Optimizer,
    prompts: Tensor,
    settings: dict[str, Any],
    pool: ThreadPoolExecutor,
) -> float:
    """Seconds of its sampling."""
    began = time.perf_counter()
    copies, count = settings["samples_per_prompt"], settings["response_tokens"]
    parts = prompts.split(max(CHUNK // copies, 1))
    found = list(pool.map(partial(floor.sample, copies=copies, count=count), parts))
    responses, old = (torch.cat(part).view(len(prompts), copies, count) for part in zip(*found, strict=True))
    sampled = time.perf_counter() - began
    torch.set_num_threads(settings["threads"])
    rewards = torch.rand(len(prompts), copies)
    advantages = (rewards - rewards.mean(1, keepdim=True)) / (rewards.std(1, keepdim=True) + 1e-6)
    share = len(prompts) // settings["steps_per_batch"]
    columns = (part.split(share) for part in (prompts, responses, old, advantages))
    for prompt, response, before, advantage in zip(*columns, strict=True):
        ratio = (floor.log_probs(prompt, response.clone()) - before).exp()
        clipped = ratio.clamp(1 - settings["eps_clip"], 1 + settings["eps_clip_high"])
        loss = -torch.minimum(ratio * advantage[..., None], clipped * advantage[..., None]).mean()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(list(floor.weights.values()), settings["clip_grad"])
        optimizer.step()
        optimizer.zero_grad()
    return sampled


def cpu_seconds() -> float:
    used = resource.getrusage(resource.RUSAGE_SELF)
    return used.ru_utime + used.ru_stime


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    rounds = int(sys.argv[3]) if len(sys.argv) > 3 else settings["batches"]
    torch.manual_seed(settings["seed"])
    floor = opened(settings)
    tokenizer = AutoTokenizer.from_pretrained(settings["hf_checkpoint"])
    rows = [json.loads(line)[settings["input_key"]] for line in Path(settings["prompt_data"]).read_text().splitlines()]
    prompts = [tokenizer.encode(text, add_special_tokens=False) for text in rows[: settings["prompts"]]]
    # Prompts of one length need no padding; those of this task are.
    longest = max(map(len, prompts))
    ids = torch.tensor([prompt for prompt in prompts if len(prompt) == longest])
    assert len(ids) == settings["prompts"], "the floor needs prompts of one length"
    optimizer = torch.optim.AdamW(
        floor.weights.values(),
        lr=settings["lr"],
        betas=(settings["adam_beta1"], settings["adam_beta2"]),
        eps=settings["adam_eps"],
        weight_decay=settings["weight_decay"],
        fused=True,
    )
    batches = []
    with ThreadPoolExecutor(settings["threads"]) as pool:
        for _ in range(rounds):
            began, used = time.perf_counter(), cpu_seconds()
            sampled = one_step(floor, optimizer, ids, settings, pool)
            samples = settings["prompts"] * settings["samples_per_prompt"]
            batches.append(
                {
                    "seconds": time.perf_counter() - began,
                    "cpu_seconds": cpu_seconds() - used,
                    "sampling_seconds": sampled,
                    "sampled": samples * settings["response_tokens"],
                    "trained": samples * (settings["response_tokens"] + longest),
                }
            )
    Path(sys.argv[2]).write_text(json.dumps({"batches": batches, "threads": settings["threads"]}))


if __name__ == "__main__":
    main()
