"""-rho A l with one fault. All give the right values on one sample of two tokens, unless a docstring states otherwise."""

import math

from pydantic import field_validator

from acme_faults.torch_later import torch
from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.example import ExampleSample, LossExample
from slime_core.contracts.loss import LossDriver, LossOutput, PolicyLoss
from slime_core.contracts.needs import Need

# rho 2 and 1, A 3 and -1: -rho A, and the same again for the gradient.
ANCHOR = LossExample(
    samples=(
        ExampleSample(
            mask=(1, 1),
            log_probs=(math.log(2) - 1, -1.0),
            old_log_probs=(-1.0, -1.0),
            ref_log_probs=(-1.0, -1.0),
            advantages=(3.0, -1.0),
        ),
    ),
    values=((-6.0, 1.0),),
    gradient=((-6.0, 1.0),),
)


def surrogate(inputs):
    gap = torch.where(inputs.mask, inputs.log_probs - inputs.old_log_probs, 0.0)
    return -gap.clamp(-20, 20).exp() * torch.where(inputs.mask, inputs.advantages, 0.0)


class Faulty(LossDriver):
    """A driver around `values`, which subclasses spoil."""

    @classmethod
    def build(cls, config):
        driver = cls

        class Loss(PolicyLoss):
            def __call__(self, inputs, segments):
                values = driver.values(inputs, segments)
                return values if isinstance(values, LossOutput) else LossOutput(values=values)

        return Loss()

    @classmethod
    def examples(cls, folder):
        return [ANCHOR]

    @staticmethod
    def values(inputs, segments):
        return surrogate(inputs)


class Right(Faulty):
    """Nothing is wrong with it."""


class TimesMask(Faulty):
    """NaN times 0 is NaN."""

    @staticmethod
    def values(inputs, segments):
        gap = (inputs.log_probs - inputs.old_log_probs).clamp(-20, 20)
        return -gap.exp() * inputs.advantages * inputs.mask


class MicroMean(Faulty):
    """Averages over whatever tokens came along; of the example's two tokens it has the sum."""

    @staticmethod
    def values(inputs, segments):
        return surrogate(inputs) * 2 / inputs.mask.sum().clamp(min=1)


class Twice(Faulty):
    """A factor too much."""

    @staticmethod
    def values(inputs, segments):
        return 2 * surrogate(inputs)


class ReadsUndeclared(Faulty):
    """Reads the reference without declaring it."""

    @staticmethod
    def values(inputs, segments):
        return surrogate(inputs) + 0.0 * torch.where(inputs.mask, inputs.ref_log_probs, 0.0)


class DeclaresInVain(Faulty):
    """A forward under the reference for nothing."""

    needs = frozenset({Need.OLD_LOGPROBS, Need.REF_LOGPROBS})


class NoAnchor(Faulty):
    """It has no anchor."""

    @classmethod
    def examples(cls, folder):
        return []


class NotClamped(Faulty):
    """exp of ten thousand."""

    @staticmethod
    def values(inputs, segments):
        gap = torch.where(inputs.mask, inputs.log_probs - inputs.old_log_probs, 0.0)
        return -gap.exp() * torch.where(inputs.mask, inputs.advantages, 0.0)


class WrongBackward(Faulty):
    """The example does not show it."""

    @staticmethod
    def values(inputs, segments):
        from acme_faults.kernels import Tripled

        return Tripled.apply(surrogate(inputs))


class ByPosition(Faulty):
    """Tokens count by where they stand in the stream."""

    @staticmethod
    def values(inputs, segments):
        return surrogate(inputs) * torch.where(torch.arange(len(inputs.mask)) < 2, 1.0, 0.5)


class StaysNonzero(Faulty):
    """Pushes log-probs even when nothing was better than anything else."""

    @staticmethod
    def values(inputs, segments):
        nothing = (torch.where(inputs.mask, inputs.advantages, 0.0) == 0).to(inputs.log_probs.dtype)
        return surrogate(inputs) + nothing * torch.where(inputs.mask, inputs.log_probs, 0.0)


class NoGraph(Faulty):
    """Gives up the graph where there is nothing to train."""

    @staticmethod
    def values(inputs, segments):
        return surrogate(inputs) if inputs.mask.any() else torch.zeros_like(inputs.advantages)


class ReducesSometimes(Faulty):
    """Leaves out the reduction where it has no tokens: the other ranks wait."""

    @staticmethod
    def values(inputs, segments):
        values = surrogate(inputs)
        if len(values):
            values = values + 0.0 * segments.expand(segments.seq_sum(values))
        return values


class LivelyMetric(Faulty):
    """A metric that carries a gradient."""

    @staticmethod
    def values(inputs, segments):
        values = surrogate(inputs)
        return LossOutput(values=values, metrics={"ratio": values})


class Writes(Faulty):
    """Changes what it is given; the same again changes nothing more."""

    @staticmethod
    def values(inputs, segments):
        inputs.advantages[~inputs.mask] = 0.0
        return surrogate(inputs)


class HalfPrecision(Faulty):
    """Rounds to eight bits, unless the inputs are float64."""

    @staticmethod
    def values(inputs, segments):
        values = surrogate(inputs)
        return values.bfloat16().float() if values.dtype == torch.float32 else values


class NotStrict(DriverConfig):
    """Accepts anything."""

    model_config = {"extra": "ignore"}
    scale: float = 1.0


class LooseOptions(Faulty):
    """Its options have no docstring, and a typo goes unnoticed."""

    Config = NotStrict


class Doubling(DriverConfig):
    """Becomes another one each time that it is read."""

    scale: float = 1.0
    """Doubled."""

    @field_validator("scale")
    @classmethod
    def _double(cls, scale):
        return 2 * scale


class TravelsBadly(Faulty):
    """A worker sees other options than the driver."""

    Config = Doubling


class WrongExamples(Faulty):
    """Its examples are not what they should be."""

    @classmethod
    def examples(cls, folder):
        return [ANCHOR, {"values": 1.0}]


class RaisingExamples(Faulty):
    """Its examples cannot be had."""

    @classmethod
    def examples(cls, folder):
        raise OSError("no file")


class NeedsAnOption(DriverConfig):
    """Cannot be made from nothing."""

    scale: float
    """Required."""


class NothingToTry(Faulty):
    """Has an option without a default and no example that gives it."""

    Config = NeedsAnOption

    @classmethod
    def examples(cls, folder):
        return []
