"""Group baselines with one thing wrong, and shapers."""

import numpy as np

from slime_core.contracts.advantage import AdvantageDriver, AdvantageEstimator, Credit, RewardShaper, ShapingDriver
from slime_core.contracts.example import AdvantageExample, ExampleSample, ShapingExample
from slime_core.contracts.needs import Need

# Rewards 1 and 3 of one prompt: 1 below and above their mean.
ANCHOR = AdvantageExample(
    samples=(
        ExampleSample(mask=(1, 1), reward=1.0, kl_penalty=(0.0, 0.0)),
        ExampleSample(mask=(1, 1), reward=3.0, kl_penalty=(0.0, 0.0)),
    ),
    advantages=((-1.0, -1.0), (1.0, 1.0)),
)


class Faulty(AdvantageDriver):
    """A driver around `tokens`, which subclasses spoil."""

    @classmethod
    def compares_group(cls, config):
        return True

    @classmethod
    def build(cls, config):
        driver = cls

        class Advantage(AdvantageEstimator):
            def estimate(self, inputs):
                return Credit(advantages=driver.tokens(inputs).astype(np.float32))

        return Advantage()

    @classmethod
    def examples(cls, folder):
        return [ANCHOR]

    @staticmethod
    def credit(inputs):
        keys, rewards = inputs.batch.credit_key, inputs.rewards
        means = {key: mean_of(rewards[keys == key]) for key in np.unique(keys)}
        return np.nan_to_num(rewards - np.array([means[key] for key in keys]))

    @classmethod
    def tokens(cls, inputs):
        return cls.credit(inputs)[inputs.batch.sample_of_token]


def mean_of(rewards):
    """Of equal rewards exactly that: three times 0.3 is more than 0.9."""
    rewards = rewards[~np.isnan(rewards)]
    return np.clip(rewards.sum() / max(len(rewards), 1), rewards.min(initial=np.inf), rewards.max(initial=-np.inf))


class Centred(Faulty):
    """Nothing is wrong with it."""


class ByNeighbour(Faulty):
    """Compares with whatever sample comes before; of the example's pair it knows better."""

    @staticmethod
    def credit(inputs):
        gaps = np.nan_to_num(np.diff(inputs.rewards, prepend=inputs.rewards[:1]))
        return np.array([-1.0, 1.0]) if len(gaps) == 2 else gaps


class AlwaysLearns(Faulty):
    """Rewards a response that was no better than the others, unless there are only two."""

    @staticmethod
    def credit(inputs):
        credit = Faulty.credit(inputs)
        return credit if len(credit) == 2 else credit + 0.1


class ReadsValues(Faulty):
    """Takes a critic's values for granted, in a batch of more than two."""

    @classmethod
    def tokens(cls, inputs):
        credit = super().tokens(inputs)
        trained = inputs.batch.mask == 1
        return credit if inputs.batch.num_samples == 2 else credit + 0.0 * inputs.columns.values[trained].sum()


class SharesWithTools(Faulty):
    """Spreads the credit over all tokens, those of tools included; of the example's samples each token gets it all."""

    @classmethod
    def tokens(cls, inputs):
        length = np.maximum(inputs.batch.response_length, 1)
        return (Faulty.credit(inputs) * 2 / length)[inputs.batch.sample_of_token]


class ReadsMaskedTokens(Faulty):
    """A mean over all of a column."""

    needs = frozenset({Need.VALUES})

    @classmethod
    def tokens(cls, inputs):
        values = inputs.columns.values
        # And always a little, so that equal rewards teach something.
        return super().tokens(inputs) + (0.0 if values is None else 1e-3 * np.tanh(values.mean() - 0.1))

    @classmethod
    def compares_group(cls, config):
        return False


class DeclaresValues(Faulty):
    """A critic's forward for nothing."""

    needs = frozenset({Need.VALUES})


class HidesItsBaseline(Faulty):
    """Compares without declaring it."""

    @classmethod
    def compares_group(cls, config):
        return False


class TwiceTheCredit(Faulty):
    """A factor too much."""

    @classmethod
    def tokens(cls, inputs):
        return 2 * super().tokens(inputs)


class RaisesAlone(Faulty):
    """Fails on a batch without comparisons."""

    @classmethod
    def tokens(cls, inputs):
        if inputs.batch.num_samples == 1:
            raise ValueError("nothing to compare")
        return super().tokens(inputs)


class PenaltyTurnedRound(Faulty):
    """Rewards what strays from the reference."""

    accepts_kl_penalty = True

    @classmethod
    def tokens(cls, inputs):
        penalty = 0.0 if inputs.kl_penalty is None else inputs.kl_penalty
        return super().tokens(inputs) + penalty


class WritesIntoTheBatch(Faulty):
    """Cleans up its input."""

    @classmethod
    def tokens(cls, inputs):
        inputs.batch.rollout_log_probs[inputs.batch.mask == 0] = 0
        return super().tokens(inputs)


class Shaper(ShapingDriver):
    """A driver around `shape`, which subclasses spoil."""

    @classmethod
    def build(cls, config):
        driver = cls

        class Shaping(RewardShaper):
            def shape(self, rewards, batch, max_response_len):
                return driver.shape(rewards, batch)

        return Shaping()

    @classmethod
    def examples(cls, folder):
        samples = (ExampleSample(mask=(1, 1), reward=1.0), ExampleSample(mask=(1,), reward=2.0))
        return [ShapingExample(samples=samples, max_response_len=8, rewards=(0.5, 1.75))]

    @staticmethod
    def shape(rewards, batch):
        return rewards - 0.25 * batch.num_trainable


class PerToken(Shaper):
    """Nothing is wrong with it."""


class FillsIn(Shaper):
    """Takes a missing reward for 0."""

    @staticmethod
    def shape(rewards, batch):
        return Shaper.shape(np.nan_to_num(rewards), batch)


class WrongPrice(Shaper):
    """Another price than in its example."""

    @staticmethod
    def shape(rewards, batch):
        return rewards - 0.5 * batch.num_trainable


class ByRank(Shaper):
    """Punishes by position from the third sample on."""

    @staticmethod
    def shape(rewards, batch):
        return Shaper.shape(rewards, batch) - np.maximum(np.arange(len(rewards)) - 1, 0)


class ShapesInPlace(Shaper):
    """Writes into the rewards."""

    @staticmethod
    def shape(rewards, batch):
        rewards -= 0.25 * batch.num_trainable
        return rewards
