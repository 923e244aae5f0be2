"""Drivers of slime-estimators: the KL estimators k1, k2, k3 and low_var_kl, which have no options, and the off-policy
corrections tis, icepop, mis and opsm.

x_t = old_t - rollout_t, the trainer's log-prob of a token minus the engine's, with the same weights.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Literal, TypeAlias

from pydantic import Field, model_validator

from slime_core.contracts.correction import CorrectionDriver, OffPolicyCorrection
from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.kl import KlDriver, KlEstimator
from slime_core.contracts.needs import Need

if TYPE_CHECKING:
    from slime_core.contracts.example import Example

# --- KL estimators ----------------------------------------------------------------------------------------------------


class K1(KlDriver):
    """d = l - ref: unbiased, high variance, any sign.

    Meant for the reward (`kl_reward_type`). As a loss its expected gradient on-policy is zero, since it is the score
    function itself: prefer k3 for `kl_loss_type`, or set `use_unbiased_kl`.
    """

    @classmethod
    def build(cls, config: DriverConfig) -> KlEstimator:
        from slime_estimators import kl

        return kl.K1()

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_estimators import kl_examples

        return kl_examples.K1


class K2(KlDriver):
    """d^2 / 2: biased, never negative; its on-policy gradient as a loss is that of the true KL."""

    never_negative = True

    @classmethod
    def build(cls, config: DriverConfig) -> KlEstimator:
        from slime_estimators import kl

        return kl.K2()

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_estimators import kl_examples

        return kl_examples.K2


class K3(KlDriver):
    """exp(-d) - 1 + d: k1 plus a control variate of mean zero; unbiased, never negative, low variance."""

    never_negative = True

    @classmethod
    def build(cls, config: DriverConfig) -> KlEstimator:
        from slime_estimators import kl

        return kl.K3()

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_estimators import kl_examples

        return kl_examples.K3


class LowVarKl(KlDriver):
    """k3 clamped to [-10, 10], so that no single token dominates the step; a clamped token has no gradient."""

    never_negative = True

    @classmethod
    def build(cls, config: DriverConfig) -> KlEstimator:
        from slime_estimators import kl

        return kl.LowVarKl()

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_estimators import kl_examples

        return kl_examples.LOW_VAR_KL


# --- Off-policy corrections -------------------------------------------------------------------------------------------


class TisConfig(DriverConfig):
    tis_clip: float = Field(2.0, gt=0, allow_inf_nan=False)
    """Largest weight."""
    tis_clip_low: float = Field(0.0, ge=0, allow_inf_nan=False)
    """Smallest weight; 0: no lower bound, as in the source."""

    @model_validator(mode="after")
    def _check_bounds(self) -> TisConfig:
        check_bounds("tis_clip_low", self.tis_clip_low, "tis_clip", self.tis_clip)
        return self


class Tis(CorrectionDriver):
    """Truncated importance sampling: w_t = clip(exp(x_t), tis_clip_low, tis_clip)."""

    Config = TisConfig
    # It does not read l, but this saves a forward pass if the old log-probs equal the current ones.
    in_loss = True

    @classmethod
    def build(cls, config: TisConfig) -> OffPolicyCorrection:
        from slime_estimators import tis

        return tis.TruncatedImportanceSampling(low=config.tis_clip_low, high=config.tis_clip)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_estimators import examples

        return examples.TIS


class IcePopConfig(DriverConfig):
    tis_clip: float = Field(5.0, gt=0, allow_inf_nan=False)
    """Tokens with a larger ratio are masked."""
    tis_clip_low: float = Field(0.5, ge=0, allow_inf_nan=False)
    """Tokens with a smaller ratio are masked."""

    @model_validator(mode="after")
    def _check_bounds(self) -> IcePopConfig:
        check_bounds("tis_clip_low", self.tis_clip_low, "tis_clip", self.tis_clip)
        return self


class IcePop(CorrectionDriver):
    """Importance sampling that masks tokens outside its bounds: w_t = exp(x_t) inside them, else 0."""

    Config = IcePopConfig
    in_loss = True

    @classmethod
    def build(cls, config: IcePopConfig) -> OffPolicyCorrection:
        from slime_estimators import icepop

        return icepop.IcePop(low=config.tis_clip_low, high=config.tis_clip)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_estimators import examples

        return examples.ICEPOP


Level: TypeAlias = Literal["token", "sequence", "geometric"]


class MisConfig(DriverConfig):
    use_tis: bool = True
    """Weight tokens with the ratio; False: all weights are 1, for rejection and veto only."""
    tis_level: Level = "token"
    """Log-ratio whose exp is the weight: token, x_t; sequence, the sum of x over the sample's trained tokens; geometric,
    their mean."""
    tis_mode: Literal["truncate", "clip", "mask"] = "truncate"
    """Weights outside the bounds: truncate lowers them to the upper bound, clip sets them to the nearer bound, mask masks the
    token."""
    tis_lower_bound: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Smallest weight; unset: 1 / tis_upper_bound. truncate does not use it."""
    tis_upper_bound: float = Field(2.0, gt=0, allow_inf_nan=False)
    """Largest weight. A geometric ratio varies much less than a token's: set about 1.0001 for it."""
    tis_batch_normalize: bool = False
    """Divide weights by their mean over the optimizer step: over trained tokens at the level token, over samples at the
    others; masked tokens do not count."""
    use_rs: bool = False
    """Rejection: mask tokens whose ratio of rs_level is outside the rs bounds."""
    rs_level: Level = "token"
    """Level of the ratio for rejection, see tis_level: sequence and geometric reject whole samples."""
    rs_lower_bound: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Smallest ratio that is kept; unset: the smallest weight."""
    rs_upper_bound: float | None = Field(None, gt=0, allow_inf_nan=False)
    """Largest ratio that is kept; unset: tis_upper_bound."""
    rs_veto_threshold: float | None = Field(1e-4, ge=0, lt=1)
    """Veto: mask a whole sample if exp(x_t) of any of its trained tokens is below this; 0: off."""

    @property
    def tis_bounds(self) -> tuple[float, float]:
        low = self.tis_lower_bound
        return 1.0 / self.tis_upper_bound if low is None else low, self.tis_upper_bound

    @property
    def rs_bounds(self) -> tuple[float, float]:
        low, high = self.tis_bounds
        low = low if self.rs_lower_bound is None else self.rs_lower_bound
        return low, high if self.rs_upper_bound is None else self.rs_upper_bound

    @model_validator(mode="after")
    def _check(self) -> MisConfig:
        check_bounds("tis_lower_bound", self.tis_bounds[0], "tis_upper_bound", self.tis_bounds[1])
        check_bounds("rs_lower_bound", self.rs_bounds[0], "rs_upper_bound", self.rs_bounds[1])
        if not (self.use_tis or self.use_rs or self.rs_veto_threshold):
            raise ValueError(
                "use_tis and use_rs are off and rs_veto_threshold is 0: nothing would be corrected. Set one of them"
            )
        return self


class Mis(CorrectionDriver):
    """Importance sampling by token, sequence or geometric mean, with three kinds of bounds, rejection and veto."""

    Config = MisConfig

    @classmethod
    def build(cls, config: MisConfig) -> OffPolicyCorrection:
        from slime_estimators import mis

        weighting = mis.Weighting(
            level=config.tis_level,
            mode=config.tis_mode,
            bounds=mis.Bounds(*config.tis_bounds),
            normalize=config.tis_batch_normalize,
        )
        rejection = mis.Rejection(level=config.rs_level, bounds=mis.Bounds(*config.rs_bounds))
        return mis.MaskedImportanceSampling(
            weighting=weighting if config.use_tis else None,
            rejection=rejection if config.use_rs else None,
            veto_threshold=config.rs_veto_threshold or None,
        )

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_estimators import examples

        return examples.MIS


class OpsmConfig(DriverConfig):
    opsm_delta: float = Field(1e-4, ge=0, allow_inf_nan=False)
    """Mean of old - l over a sample's trained tokens, in nats, above which its tokens with negative advantage are
    masked."""


class Opsm(CorrectionDriver):
    """Off-policy sequence masking: masks bad responses whose probability the policy has already reduced."""

    Config = OpsmConfig
    needs = frozenset({Need.OLD_LOGPROBS})
    in_loss = True
    compares_with_old = True

    @classmethod
    def build(cls, config: OpsmConfig) -> OffPolicyCorrection:
        from slime_estimators import opsm

        return opsm.OffPolicySequenceMask(delta=config.opsm_delta)

    @classmethod
    def examples(cls, folder: Path) -> Sequence[Example]:
        from slime_estimators import examples

        return examples.OPSM


def check_bounds(low_key: str, low: float, high_key: str, high: float) -> None:
    if low >= high:
        raise ValueError(f"{low_key} = {low:g} must be below {high_key} = {high:g}")
