"""The language-model head, a chunk of positions at a time.

Legend: T positions, C positions of a chunk, H hidden, V vocabulary, or a rank's part of it. Both functions of logits read
them once or twice and write nothing wider; compiled, they have no (C, V) temporaries.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from slime_core.contracts.backend import Objective
from slime_training.fusion import fused

EntropyMode = Literal["none", "metric", "gradient"]

CHUNK_LOGITS: Final = 2**27
"""float32 logits of an automatic chunk: 512 MiB."""


def requested_entropy(objective: Objective) -> EntropyMode:
    """Which entropy a training step computes for `objective`."""
    if objective.entropy_has_gradient:
        return "gradient"
    return "metric" if objective.needs_entropy else "none"


def chunk_positions(vocab_size: int, asked: int) -> int:
    """Returns the positions per chunk. `asked` 0: what CHUNK_LOGITS allows; -1: no limit."""
    if asked == -1:
        return 2**62
    return asked or max(CHUNK_LOGITS // max(vocab_size, 1), 1)


def scaled(logits_CV: Tensor, temperature: float) -> Tensor:
    """Returns logits / temperature in float32, or in float64 if the logits are float64; then the result is `logits_CV`
    itself."""
    wide = logits_CV.to(torch.promote_types(logits_CV.dtype, torch.float32))
    if temperature == 1.0:
        return wide
    # CUDA multiplies by the rounded reciprocal of a Python number, which is off by two last places; an engine divides by a
    # tensor.
    return wide.div_(torch.full((), temperature, dtype=wide.dtype, device=wide.device))


def statistics(
    logits_CV: Tensor, targets_C: Tensor, temperature: float, entropy: bool
) -> tuple[Tensor, Tensor, Tensor | None]:
    """For z = logits / temperature: log sum exp z, z at the target and, if requested, the entropy of softmax z; (C,), float32
    at least. The logits may be overwritten."""
    z_CV = scaled(logits_CV, temperature)
    log_sums_C = z_CV.logsumexp(-1)
    chosen_C = z_CV.gather(-1, targets_C[:, None])[:, 0]
    if not entropy:
        return log_sums_C, chosen_C, None
    log_p_CV = z_CV.sub_(log_sums_C[:, None])
    return log_sums_C, chosen_C, -(log_p_CV.exp() * log_p_CV).sum(-1)


def logit_gradients(
    logits_CV: Tensor,
    log_sums_C: Tensor,
    entropies_C: Tensor,
    grad_log_probs_C: Tensor | None,
    grad_entropies_C: Tensor | None,
    temperature: float,
) -> Tensor:
    """(C, V) gradient of the logits, which may be overwritten. Without the additional term at the target's own logit."""
    log_p_CV = scaled(logits_CV, temperature).sub_(log_sums_C[:, None])
    columns = (None if grad is None else grad[:, None] for grad in (grad_log_probs_C, grad_entropies_C))
    taken_CV = taken_per_probability(log_p_CV, entropies_C[:, None], *columns)
    return log_p_CV.exp_().mul_(taken_CV / -temperature).to(logits_CV.dtype)


def taken_per_probability(
    log_p: Tensor, entropies: Tensor, grad_log_probs: Tensor | None, grad_entropies: Tensor | None
) -> Tensor:
    """Uses d log p_t / dz_v = [v = t] - p_v and dH / dz_v = -p_v (log p_v + H): returns the factor of -p_v."""
    taken = torch.zeros_like(entropies) if grad_log_probs is None else grad_log_probs
    return taken if grad_entropies is None else taken + (log_p + entropies) * grad_entropies


@dataclass(frozen=True, kw_only=True, eq=False)
class ChunkedLMHead:
    """Log-probs and entropies at positions, and their gradients. No (T, V) tensor is kept beyond its chunk: the backward
    recomputes each chunk's logits."""

    weight_VH: Tensor
    bias_V: Tensor | None
    temperature: float
    chunk: int
    fuse: bool
    """Compile the functions of logits."""
    added_VR: Tensor | None = None
    """B of an adapter: the last R features of `hidden`, s A h, are for it. None: `hidden` has none."""

    def logits(self, hidden_CH: Tensor) -> Tensor:
        """(C, V)"""
        if self.added_VR is None:
            return torch.nn.functional.linear(hidden_CH, self.weight_VH, self.bias_V)
        width = self.weight_VH.shape[1]
        # Contiguous: another stride may be multiplied by another kernel, with other roundings than without an adapter.
        own_CH = hidden_CH[:, :width].contiguous()
        logits_CV = torch.nn.functional.linear(own_CH, self.weight_VH, self.bias_V)
        return logits_CV.addmm_(hidden_CH[:, width:], self.added_VR.to(logits_CV.dtype).t())

    def statistics(
        self, hidden_CH: Tensor, targets_C: Tensor, *, entropy: bool
    ) -> tuple[Tensor, Tensor, Tensor | None]:
        """See the function."""
        compute = fused(statistics) if self.fuse else statistics
        found: tuple[Tensor, Tensor, Tensor | None] = compute(
            self.logits(hidden_CH), targets_C, self.temperature, entropy
        )
        return found

    def parts(self, positions: int) -> Iterator[slice]:
        return (slice(start, start + self.chunk) for start in range(0, positions, self.chunk))

    def gradients(
        self,
        hidden_TH: Tensor,
        targets_T: Tensor,
        held_T: Tensor | None,
        found: Found,
        grad_log_probs_T: Tensor | None,
        grad_entropies_T: Tensor | None,
        *,
        of_weight: bool,
        of_bias: bool,
    ) -> HeadGradients:
        """`held_T`: targets that are among these V; None: all."""
        compute = fused(logit_gradients) if self.fuse else logit_gradients
        sums = HeadSums(self, hidden_TH, found.log_sums_T.dtype, of_weight=of_weight, of_bias=of_bias)
        taken_T = taken_per_probability(found.log_probs_T, found.entropies_T, grad_log_probs_T, grad_entropies_T)
        given_T = 0.0 if grad_log_probs_T is None else grad_log_probs_T
        chosen_T = (given_T - found.log_probs_T.exp() * taken_T) / self.temperature
        for part in self.parts(len(targets_T)):
            hidden_CH, targets_C1 = hidden_TH[part], targets_T[part, None]
            grad_CV = compute(
                self.logits(hidden_CH),
                found.log_sums_T[part],
                found.entropies_T[part],
                None if grad_log_probs_T is None else grad_log_probs_T[part],
                None if grad_entropies_T is None else grad_entropies_T[part],
                self.temperature,
            )
            chosen_C1 = chosen_T[part, None].to(grad_CV.dtype)
            if held_T is not None:
                chosen_C1 = torch.where(held_T[part, None], chosen_C1, grad_CV.gather(-1, targets_C1))
            grad_CV.scatter_(-1, targets_C1, chosen_C1)
            sums.add(part, hidden_CH, grad_CV)
        return sums.gradients()


class HeadSums:
    """Gradients of a head's inputs and weights, to which chunks of positions are added."""

    def __init__(
        self, head: ChunkedLMHead, hidden_TH: Tensor, wide: torch.dtype, *, of_weight: bool, of_bias: bool
    ) -> None:
        """`wide`: in which the chunks' contributions are added."""
        weight_VH, bias_V, added_VR = head.weight_VH, head.bias_V, head.added_VR
        self._head = head
        self._hidden = torch.zeros_like(hidden_TH)
        self._added = None if added_VR is None else torch.zeros_like(added_VR, dtype=wide)
        self._weight = torch.zeros_like(weight_VH, dtype=wide) if of_weight else None
        self._bias = torch.zeros_like(bias_V, dtype=wide) if of_bias and bias_V is not None else None

    def add(self, part: slice, hidden_CH: Tensor, grad_CV: Tensor) -> None:
        weight_VH, added_VR = self._head.weight_VH, self._head.added_VR
        width = weight_VH.shape[1]
        self._hidden[part, :width] = grad_CV @ weight_VH
        if self._added is not None and added_VR is not None:
            self._hidden[part, width:] = grad_CV @ added_VR.to(grad_CV.dtype)
            self._added += grad_CV.t() @ hidden_CH[:, width:]
        if self._weight is not None:
            self._weight += grad_CV.t() @ hidden_CH[:, :width]
        if self._bias is not None:
            self._bias += grad_CV.sum(0)

    def gradients(self) -> HeadGradients:
        bias_V, added_VR = self._head.bias_V, self._head.added_VR
        return HeadGradients(
            hidden=self._hidden,
            weight=None if self._weight is None else self._weight.to(self._head.weight_VH.dtype),
            bias=None if self._bias is None or bias_V is None else self._bias.to(bias_V.dtype),
            added=None if self._added is None or added_VR is None else self._added.to(added_VR.dtype),
        )


class HeadGradients(NamedTuple):
    """None: not requested."""

    hidden: Tensor
    weight: Tensor | None
    bias: Tensor | None
    added: Tensor | None


@dataclass(frozen=True, kw_only=True, eq=False)
class Found:
    """Values kept for the backward, (T,) float32 or wider each."""

    log_probs_T: Tensor
    log_sums_T: Tensor
    entropies_T: Tensor
    """Undefined if nothing requires their gradient."""
