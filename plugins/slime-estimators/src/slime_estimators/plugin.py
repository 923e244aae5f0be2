"""What slime-estimators registers: the KL estimators k1, k2, k3 and low_var_kl. None of them has options."""

from __future__ import annotations

from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.kl import KlDriver, KlEstimator


class K1(KlDriver):
    """d = l - ref: unbiased, high variance, any sign.

    Meant for the reward side (`kl_reward_type`). As a loss its expected gradient on-policy is zero, since it is the
    score function itself: prefer k3 for `kl_loss_type`, or ask for `use_unbiased_kl` with it.
    """

    @classmethod
    def build(cls, config: DriverConfig) -> KlEstimator:
        from slime_estimators import kl

        return kl.K1()


class K2(KlDriver):
    """d^2 / 2: biased, never negative; its on-policy gradient as a loss is that of the true KL."""

    @classmethod
    def build(cls, config: DriverConfig) -> KlEstimator:
        from slime_estimators import kl

        return kl.K2()


class K3(KlDriver):
    """exp(-d) - 1 + d: k1 plus a control variate of mean zero; unbiased, never negative, low variance."""

    @classmethod
    def build(cls, config: DriverConfig) -> KlEstimator:
        from slime_estimators import kl

        return kl.K3()


class LowVarKl(KlDriver):
    """k3 clamped to [-10, 10], so that one token cannot carry the step; a clamped token has no gradient."""

    @classmethod
    def build(cls, config: DriverConfig) -> KlEstimator:
        from slime_estimators import kl

        return kl.LowVarKl()
