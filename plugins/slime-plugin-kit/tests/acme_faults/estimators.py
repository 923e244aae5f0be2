"""KL estimators and corrections with one thing wrong."""

import numpy as np

from acme_faults.torch_later import torch
from slime_core.contracts.correction import BatchCorrection, CorrectionDriver, LossCorrection, OffPolicyCorrection
from slime_core.contracts.example import CorrectionExample, ExampleSample, KlExample
from slime_core.contracts.kl import KlDriver, KlEstimator
from slime_core.contracts.needs import Need

# d = 0.5 and -1: half the square, and d.
SQUARE = KlExample(log_probs=(-1.0, -2.0), ref_log_probs=(-1.5, -1.0), values=(0.125, 0.5), gradient=(0.5, -1.0))
# Ratios 2 and 1/2.
GAP = 0.693147181
RATIOS = CorrectionExample(
    samples=(
        ExampleSample(
            mask=(1, 1),
            log_probs=(-1.0, -1.0),
            old_log_probs=(-1.0, -1.0),
            rollout_log_probs=(-1.0 - GAP, -1.0 + GAP),
            advantages=(1.0, 1.0),
        ),
    ),
    weights=((2.0, 0.5),),
)


class FaultyKl(KlDriver):
    """d^2 / 2 around `estimate`, which subclasses spoil."""

    never_negative = True

    @classmethod
    def build(cls, config):
        driver = cls

        class Kl(KlEstimator):
            def __call__(self, log_probs, ref_log_probs, ratio=None):
                return driver.estimate(log_probs, ref_log_probs, ratio)

        return Kl()

    @classmethod
    def examples(cls, folder):
        return [SQUARE]

    @staticmethod
    def estimate(log_probs, ref_log_probs, ratio):
        values = (log_probs - ref_log_probs).square() / 2
        return values if ratio is None else ratio * values


class Square(FaultyKl):
    """Nothing is wrong with it."""


class WrongSign(FaultyKl):
    """ref - l, in its example too."""

    never_negative = False

    @classmethod
    def examples(cls, folder):
        return [KlExample(log_probs=(-1.0,), ref_log_probs=(-1.5,), values=(-0.5,), gradient=(-1.0,))]

    @staticmethod
    def estimate(log_probs, ref_log_probs, ratio):
        return (ref_log_probs - log_probs) * (1.0 if ratio is None else ratio)


class HalfTheKl(FaultyKl):
    """A factor too little."""

    @staticmethod
    def estimate(log_probs, ref_log_probs, ratio):
        return FaultyKl.estimate(log_probs, ref_log_probs, ratio) / 2


class WronglyNeverNegative(FaultyKl):
    """d, which can be."""

    @classmethod
    def examples(cls, folder):
        return [KlExample(log_probs=(-1.0,), ref_log_probs=(-1.5,), values=(0.5,), gradient=(1.0,))]

    @staticmethod
    def estimate(log_probs, ref_log_probs, ratio):
        return (log_probs - ref_log_probs) * (1.0 if ratio is None else ratio)


class IgnoresRatio(FaultyKl):
    """Biased off-policy."""

    @staticmethod
    def estimate(log_probs, ref_log_probs, ratio):
        return FaultyKl.estimate(log_probs, ref_log_probs, None)


class NotZero(FaultyKl):
    """Keeps away from zero; not where the example looks."""

    @staticmethod
    def estimate(log_probs, ref_log_probs, ratio):
        values = FaultyKl.estimate(log_probs, ref_log_probs, None).clamp(min=1e-9)
        return values if ratio is None else ratio * values


class Explodes(FaultyKl):
    """cosh(d) - 1 without a clamp."""

    @classmethod
    def examples(cls, folder):
        return [KlExample(log_probs=(-1.0,), ref_log_probs=(-2.0,), values=(0.543080635,), gradient=(1.175201194,))]

    @staticmethod
    def estimate(log_probs, ref_log_probs, ratio):
        values = torch.cosh(log_probs - ref_log_probs) - 1
        return values if ratio is None else ratio * values


class AveragesTokens(FaultyKl):
    """Takes the largest token for all, in longer streams."""

    @staticmethod
    def estimate(log_probs, ref_log_probs, ratio):
        values = FaultyKl.estimate(log_probs, ref_log_probs, ratio)
        return values if values.dim() < 2 else values.max().expand_as(values)


class RoundedKl(FaultyKl):
    """Eight bits, unless the inputs are float64."""

    @staticmethod
    def estimate(log_probs, ref_log_probs, ratio):
        values = FaultyKl.estimate(log_probs, ref_log_probs, ratio)
        return values.bfloat16().float() if values.dtype == torch.float32 else values


class WrongSlope(FaultyKl):
    """A kernel whose backward is wrong for large estimates."""

    @staticmethod
    def estimate(log_probs, ref_log_probs, ratio):
        from acme_faults.kernels import HalvedBeyondOne

        values = HalvedBeyondOne.apply(FaultyKl.estimate(log_probs, ref_log_probs, None))
        return values if ratio is None else ratio * values


class WritesRatio(FaultyKl):
    """Nudges what it is given."""

    @staticmethod
    def estimate(log_probs, ref_log_probs, ratio):
        values = FaultyKl.estimate(log_probs, ref_log_probs, ratio)
        if ratio is not None and not values.requires_grad:
            ratio.add_(1e-9)
        return values


class FaultyCorrection(CorrectionDriver):
    """The ratio of trainer to engine, between 0 and 5, around `ratio`, which subclasses spoil."""

    in_loss = True

    @classmethod
    def build(cls, config):
        driver = cls

        class Correction(OffPolicyCorrection):
            def correct_loss(self, inputs, segments):
                return LossCorrection(weights=driver.weigh(inputs, segments))

            def correct_batch(self, batch, columns):
                return driver.weigh_batch(batch, columns)

        return Correction()

    @classmethod
    def examples(cls, folder):
        return [RATIOS]

    @staticmethod
    def weigh(inputs, segments):
        gap = torch.where(inputs.mask, inputs.old_log_probs - inputs.rollout_log_probs, 0.0)
        return gap.clamp(-20, 20).exp().clamp(max=5.0)

    @staticmethod
    def weigh_batch(batch, columns):
        trained = batch.mask == 1
        gap = np.where(trained, columns.old_log_probs, 0) - np.where(trained, batch.rollout_log_probs, 0)
        weights = np.minimum(np.exp(np.clip(gap, -20, 20)), 5.0)
        return BatchCorrection(weights=weights.astype(np.float32), keep=np.ones(len(weights), np.bool_))


class InLoss(FaultyCorrection):
    """Nothing is wrong with it."""


class OnBatch(FaultyCorrection):
    """Nor with it."""

    in_loss = False


class Lively(FaultyCorrection):
    """Carries a gradient, through the current log-probs."""

    @staticmethod
    def weigh(inputs, segments):
        weights = FaultyCorrection.weigh(inputs, segments)
        return weights + 0.0 * torch.where(inputs.mask, inputs.log_probs, 0.0)


class NeverOne(FaultyCorrection):
    """Damps what needs no damping."""

    in_loss = False

    @staticmethod
    def weigh_batch(batch, columns):
        got = FaultyCorrection.weigh_batch(batch, columns)
        weights = np.where(got.weights == 1, np.float32(0.9), got.weights)
        return BatchCorrection(weights=weights, keep=got.keep)


class MicroNormal(FaultyCorrection):
    """Normalizes over the tokens of the micro-batch, except for the example's two."""

    @staticmethod
    def weigh(inputs, segments):
        weights = FaultyCorrection.weigh(inputs, segments)
        if len(weights) == 2:
            return weights
        trained = weights[inputs.mask]
        return weights / trained.mean() if len(trained) else weights


class NoClamp(FaultyCorrection):
    """exp of ten thousand."""

    in_loss = False

    @staticmethod
    def weigh_batch(batch, columns):
        trained = batch.mask == 1
        gap = np.where(trained, columns.old_log_probs - batch.rollout_log_probs, 0)
        with np.errstate(over="ignore"):
            weights = np.exp(gap)
        return BatchCorrection(weights=weights.astype(np.float32), keep=np.ones(len(weights), np.bool_))


class ForgetsToDeclare(FaultyCorrection):
    """Reads the reference in larger batches."""

    in_loss = False

    @staticmethod
    def weigh_batch(batch, columns):
        got = FaultyCorrection.weigh_batch(batch, columns)
        if len(got.weights) > 2:
            assert columns.ref_log_probs is not None
        return got


class DeclaresTooMuch(FaultyCorrection):
    """A teacher's forward for nothing."""

    needs = CorrectionDriver.needs | {Need.TEACHER_LOGPROBS}


class WritesColumns(FaultyCorrection):
    """Cleans up its input."""

    in_loss = False

    @staticmethod
    def weigh_batch(batch, columns):
        columns.old_log_probs[batch.mask == 0] = -7.0
        return FaultyCorrection.weigh_batch(batch, columns)


class WrongBound(FaultyCorrection):
    """Cuts earlier than in its example."""

    @staticmethod
    def weigh(inputs, segments):
        return FaultyCorrection.weigh(inputs, segments).clamp(max=1.5)


class ReadsToolTokens(FaultyCorrection):
    """A sum over all of a column."""

    in_loss = False

    @staticmethod
    def weigh_batch(batch, columns):
        got = FaultyCorrection.weigh_batch(batch, columns)
        with np.errstate(invalid="ignore", over="ignore"):
            leak = np.float32(0.0) * batch.rollout_log_probs.sum()
        return BatchCorrection(weights=got.weights + leak, keep=got.keep)


class NeedsTokens(FaultyCorrection):
    """Fails where nothing is trained."""

    in_loss = False

    @staticmethod
    def weigh_batch(batch, columns):
        assert batch.mask.any()
        return FaultyCorrection.weigh_batch(batch, columns)


class ByPlace(FaultyCorrection):
    """Trusts the first tokens of a batch more."""

    in_loss = False

    @staticmethod
    def weigh_batch(batch, columns):
        got = FaultyCorrection.weigh_batch(batch, columns)
        trust = np.where(np.arange(len(got.weights)) < 2, 1.0, 0.9)
        return BatchCorrection(weights=(got.weights**trust).astype(np.float32), keep=got.keep)
