"""What transformers alone makes of the same model: no code of the engine in here."""

import numpy as np
import torch
import xxhash
from transformers import AutoModelForCausalLM

from slime_core.types.completion import GenerateRequest, SamplingParams
from slime_core.types.weights import Bucket


def plain_model(folder):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager").eval()


@torch.no_grad()
def log_probs(model, prompt, response, temperature=1.0):
    """(R,) of `response` after `prompt`, one sequence alone, float64 softmax."""
    tokens = torch.tensor([[*map(int, prompt), *map(int, response)]])
    logits = model(tokens).logits[0].double() / temperature
    rows = logits[len(prompt) - 1 : -1].log_softmax(-1)
    return rows.gather(1, tokens[0, len(prompt) :, None])[:, 0].numpy()


@torch.no_grad()
def next_probs(model, prompt, temperature=1.0):
    logits = model(torch.tensor([list(map(int, prompt))])).logits[0, -1].double() / temperature
    return logits.softmax(-1).numpy()


@torch.no_grad()
def greedy(model, prompt, max_new_tokens, **options):
    tokens = torch.tensor([list(map(int, prompt))])
    out = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), do_sample=False, max_new_tokens=max_new_tokens, **options
    )
    return out[0, len(prompt) :].tolist()


def prompts(count, *, seed=0, low=1, high=12, vocab=31):
    rng = np.random.default_rng(seed)
    return [rng.integers(3, vocab - 1, rng.integers(low, high + 1)).astype(np.int32) for _ in range(count)]


def request(name, prompt, *, seed=0, **sampling):
    sampling.setdefault("max_new_tokens", 10)
    return GenerateRequest(
        request_id=str(name), token_ids=np.asarray(prompt, np.int32), sampling=SamplingParams(**sampling), seed=seed
    )


def as_in_files(model):
    """Weights as files of the family have them: experts apart, gate and up too."""
    found = {}
    for name, parameter in model.named_parameters():
        parts = {name: parameter}
        prefix, is_fused, kind = name.rpartition(".experts.")
        if is_fused and kind == "gate_up_proj":
            parts = {
                f"{prefix}.experts.{expert}.{half}_proj.weight": rows
                for expert, both in enumerate(parameter)
                for half, rows in zip(("gate", "up"), both.chunk(2), strict=True)
            }
        elif is_fused and kind == "down_proj":
            parts = {f"{prefix}.experts.{expert}.down_proj.weight": one for expert, one in enumerate(parameter)}
        found |= {part: tensor.detach() for part, tensor in parts.items()}
    return found


def buckets(model, version, count=2, *, skip=(), tied_twice=False):
    """The weights of `model` in `count` buckets."""
    named = {name: tensor for name, tensor in as_in_files(model).items() if name not in skip}
    if tied_twice:
        named["lm_head.weight"] = model.lm_head.weight
    names = sorted(named)
    parts = [names[part::count] for part in range(count)]
    made = []
    for index, part in enumerate(parts):
        tensors = [named[name].detach().contiguous() for name in part]
        data = np.concatenate([t.view(torch.uint8).numpy().reshape(-1) for t in tensors])
        data.flags.writeable = False
        made.append(
            Bucket(
                version=version,
                index=index,
                last=index == count - 1,
                names=part,
                dtypes=[str(t.dtype).removeprefix("torch.") for t in tensors],
                shapes=[tuple(t.shape) for t in tensors],
                data=data,
                checksum=xxhash.xxh3_64_hexdigest(data),
            )
        )
    return made


def other_weights(folder, seed, scale=0.1):
    """The folder's model with noise on every weight."""
    model = plain_model(folder)
    torch.manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(scale * torch.randn_like(parameter))
    return model
