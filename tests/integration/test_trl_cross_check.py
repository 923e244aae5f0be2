"""Advantages and losses against TRL's own trainers, on the same batch, in float64.

The trainers are real: built by TRL from TRL's configs, they score the rewards and compute the loss with their own code.
The model is replaced: `_generate` returns the batch's tokens, and the log-probs of the policy, the old policy
and the reference are numbers. Where the two differ on purpose, a test states by how much.

TRL 1.16 has no PPO trainer, so GAE is not compared.
"""

from __future__ import annotations

import json
import math
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch.nn.utils.rnn import pad_sequence
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer, RLOOConfig, RLOOTrainer

from slime_core.algorithm.advantages import compute_advantages_and_returns
from slime_core.algorithm.loss import TokenObjective
from slime_core.algorithm.packing import pack_micro_batch
from slime_core.cli.invocation import bind_invocation, parse_words
from slime_core.contracts.advantage import CreditInputs
from slime_core.controller.learner import advantage_config
from slime_core.errors import ConfigError
from slime_core.types.batch import Batch, TokenColumns
from slime_training.segments import LocalSegments

GROUP_SIZE = 4
MAX_LEN = 16
EOS, WORD = 0, 1


# --- The batch --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """Four prompts with four responses each; per-token numbers one response after the other. Every one of them is a float32,
    held in float64, so that both sides start from the same."""

    lengths: list[int]
    mask: list[list[int]]
    rewards: list[float | None]
    log_probs: torch.Tensor
    old: torch.Tensor
    ref: torch.Tensor
    entropy: torch.Tensor


UNSCORED = None
REWARDS = [
    *(1.0, 0.0, 0.5, -0.25),
    *(2.0, UNSCORED, 1.0, 0.75),  # one without a reward
    *(0.5, 0.5, 0.5, 0.5),  # all the same
    *(3.0, UNSCORED, UNSCORED, UNSCORED),  # one to compare with nothing
]
LENGTHS = [9, 5, 0, 7, 12, 4, 1, 10, 2, 3, 5, 1, 3, 2, 16, 4]


def make_case(gap: float, *, reward_scale: float = 1.0, lengths: list[int] = LENGTHS, tools: bool = True) -> Case:
    """`gap`: how far the policy is from the old one. With `tools`, some tokens in between, and all of response 3, are not
    trained."""
    rng = np.random.default_rng(11)
    mask = [[int(not tools or rng.random() > 0.25) for _ in range(length)] for length in lengths]
    if tools:
        mask[3] = [0] * lengths[3]
        mask[6] = [1]
        mask[7][2:4] = [0, 0]
    total = sum(lengths)
    old = rng.normal(-2, 0.7, total)
    columns = [old + gap * rng.normal(size=total), old, old + 0.4 * rng.normal(size=total), rng.uniform(0, 3, total)]
    log_probs, old, ref, entropy = (torch.tensor(c.astype(np.float32)).double() for c in columns)
    rewards = [None if reward is UNSCORED else reward_scale * reward for reward in REWARDS]
    return Case(lengths, mask, rewards, log_probs, old, ref, entropy)


@dataclass(frozen=True)
class Step:
    """The results of one side for a case."""

    credit: np.ndarray
    """(S,) the advantage of every response."""
    loss: float
    gradient: np.ndarray
    """(M,) with respect to the log-probs."""
    entropy_gradient: np.ndarray
    """(M,)"""


def gradient_of(leaf: torch.Tensor) -> np.ndarray:
    return np.zeros(len(leaf)) if leaf.grad is None else leaf.grad.numpy()


# --- The oracle: TRL. Nothing here comes from slime -------------------------------------------------------------------


class GivenModel(torch.nn.Module):
    """Returns these numbers from every forward: one row of log-probs and entropies for each response, padded."""

    is_gradient_checkpointing = False

    def __init__(self, lengths: list[int], log_probs: torch.Tensor, entropy: torch.Tensor) -> None:
        super().__init__()
        self._output = SimpleNamespace(
            log_probs=pad_sequence(torch.split(log_probs, lengths), batch_first=True),
            entropy=pad_sequence(torch.split(entropy, lengths), batch_first=True),
        )

    def forward(self, **inputs: Any) -> SimpleNamespace:
        assert inputs["fused_lm_head"]
        return self._output


@pytest.fixture(scope="module")
def make_trainer(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Any]:
    """A trainer for 16 responses. Its model and tokenizer are never called."""
    folder = tmp_path_factory.mktemp("trl")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer(WordLevel({"<eos>": EOS, "a": WORD}, unk_token="a")),
        eos_token="<eos>",
        pad_token="<eos>",
    )
    sizes = {"hidden_size": 4, "intermediate_size": 4, "num_hidden_layers": 1, "num_attention_heads": 1}
    LlamaForCausalLM(LlamaConfig(vocab_size=8, **sizes)).save_pretrained(folder / "model")

    def make(trainer: type, config: type, rewards: list[float | None], **options: Any) -> Any:
        arguments = config(
            output_dir=str(folder / "out"),
            per_device_train_batch_size=len(LENGTHS),
            num_generations=GROUP_SIZE,
            max_completion_length=MAX_LEN,
            # Two passes over a batch: the old log-probs are then scored, not taken from the current ones.
            num_iterations=2,
            report_to="none",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            disable_tqdm=True,
            **options,
        )
        return trainer(
            str(folder / "model"),
            reward_funcs=lambda **_: rewards,
            args=arguments,
            train_dataset=Dataset.from_dict({"prompt": ["a"]}),
            processing_class=tokenizer,
        )

    return make


@pytest.fixture
def float64() -> Iterator[None]:
    """TRL fills rewards into a tensor of the default type."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(before)


@pytest.fixture
def trl_step(make_trainer: Callable[..., Any], float64: None) -> Callable[..., Step]:
    def step(case: Case, trainer_class: type, config: type, **options: Any) -> Step:
        trainer = make_trainer(trainer_class, config, case.rewards, **options)
        trainer.model = GivenModel(case.lengths, case.old, case.entropy)
        trainer.ref_model = GivenModel(case.lengths, case.ref, case.entropy)
        # The training loop sets it at its start.
        trainer.current_gradient_accumulation_steps = 1
        completions = [[WORD] * (length - 1) + [EOS] * min(length, 1) for length in case.lengths]
        prompts = [[WORD]] * len(completions)
        texts = [""] * len(completions)
        if trainer_class is RLOOTrainer:
            trainer._generate = lambda _: (prompts, completions, texts)
        else:
            trainer._generate = lambda _: (prompts, completions, case.mask, texts, None, {}, None, None)
        inputs = trainer._generate_and_score_completions([{"prompt": "a"}] * len(completions))
        log_probs, entropy = (leaf.clone().requires_grad_() for leaf in (case.log_probs, case.entropy))
        loss = trainer._compute_loss(GivenModel(case.lengths, log_probs, entropy), inputs)
        assert loss.dtype == inputs["advantages"].dtype == torch.float64
        loss.backward()
        return Step(
            inputs["advantages"].numpy(),
            float(loss.detach()),
            gradient_of(log_probs),
            gradient_of(entropy),
        )

    return step


# --- The code under test ----------------------------------------------------------------------------------------------

RUN = f"""
name = "cross"
model = {{ hf_checkpoint = "base" }}
data = {{ prompt_data = ["train.jsonl"], input_key = "prompt" }}
backend = "fsdp"
engine = "local"
reward = "gsm8k"
rollout = {{ rollout_batch_size = 4, n_samples_per_prompt = {GROUP_SIZE}, rollout_max_response_len = {MAX_LEN} }}
train = {{ num_rollout = 1, global_batch_size = 16 }}
"""
MODEL = {"model_type": "llama", "hidden_size": 8, "num_attention_heads": 2, "num_hidden_layers": 1, "vocab_size": 32}


@pytest.fixture
def slime_step(tmp_path: Path) -> Callable[..., Step]:
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps(MODEL))
    (tmp_path / "run.toml").write_text(RUN)

    def step(case: Case, *flags: str) -> Step:
        words = parse_words([str(tmp_path / "run.toml"), *flags], switches=(), options=(), command="run")
        run = bind_invocation(words)
        batch = batch_of(case)
        columns = TokenColumns(old_log_probs=case.old.float().numpy(), ref_log_probs=case.ref.float().numpy())
        credited = compute_advantages_and_returns(batch, columns, advantage_config(run, run.algo))
        algo, keys = run.algo, run.algo.keys
        objective = TokenObjective(
            loss=algo.loss.build(),
            needs=frozenset(algo.loss.driver.needs),
            kl=None if algo.kl_loss is None else algo.kl_loss.build(),
            kl_loss_coef=keys.kl_loss_coef,
            use_unbiased_kl=keys.use_unbiased_kl,
            entropy_coef=keys.entropy_coef,
        )
        micro = pack_micro_batch(batch, np.arange(batch.num_samples), columns=credited.columns)
        log_probs, entropy = (leaf.clone().requires_grad_() for leaf in (case.log_probs, case.entropy))
        segments = LocalSegments(micro.segments, micro.num_samples)
        output = objective(micro, segments=segments, log_probs=log_probs, entropy=entropy)
        output.loss.backward()
        inputs = CreditInputs(batch=batch, rewards=batch.reward, columns=TokenColumns(), kl_penalty=None)
        return Step(
            algo.advantage.build().estimate(inputs).sample_credit,
            float(output.loss.detach()),
            gradient_of(log_probs),
            gradient_of(entropy),
        )

    return step


def batch_of(case: Case) -> Batch:
    count, total = len(case.lengths), sum(case.lengths)
    group = np.repeat(np.arange(count // GROUP_SIZE), GROUP_SIZE)
    return Batch(
        index=np.arange(count),
        group_index=group,
        rollout_id=np.arange(count),
        credit_key=group,
        reward=np.array([math.nan if reward is None else reward for reward in case.rewards]),
        truncated=np.zeros(count, np.bool_),
        prompt_length=np.ones(count, np.int32),
        response_length=np.array(case.lengths, np.int32),
        tokens=np.full(count + total, WORD, np.int32),
        mask=np.array([bit for mask in case.mask for bit in mask], np.uint8),
        rollout_log_probs=np.zeros(total, np.float32),
        version=np.zeros(total, np.int32),
    )


def assert_same(ours: Any, theirs: Any, tolerance: float = 1e-6) -> None:
    """To `tolerance` of the largest of the numbers."""
    np.testing.assert_allclose(ours, theirs, rtol=tolerance, atol=tolerance * np.abs(theirs).max())


# --- GRPO and its relatives -------------------------------------------------------------------------------------------

GRPO = {"loss_type": "grpo", "epsilon": 0.2, "beta": 0.0, "use_bias_correction_kl": False}
DAPO = GRPO | {"loss_type": "dapo", "epsilon_high": 0.28}
# Flags of slime, options of TRL's GRPOConfig, and the gap: so far off-policy that some tokens clip and some do not.
VARIANTS: dict[str, tuple[list[str], dict[str, Any], float]] = {
    "grpo": (["--algo", "grpo"], GRPO, 0.3),
    "clip higher": (
        ["--algo", "grpo", "--algo.eps-clip", "0.1", "--algo.eps-clip-high", "0.3"],
        GRPO | {"epsilon": 0.1, "epsilon_high": 0.3},
        0.3,
    ),
    "dual clip": (["--algo", "grpo", "--algo.eps-clip-c", "1.25"], GRPO | {"delta": 1.25}, 0.3),
    "k3 in the loss": (["--algo", "grpo", "--kl-loss-coef", "0.3"], GRPO | {"beta": 0.3}, 0.3),
    "unbiased k3": (
        ["--algo", "grpo", "--kl-loss-coef", "0.3", "--use-unbiased-kl"],
        GRPO | {"beta": 0.3, "use_bias_correction_kl": True},
        0.3,
    ),
    "dr_grpo": (["--algo", "dr_grpo"], GRPO | {"loss_type": "dr_grpo", "scale_rewards": "none"}, 0.3),
    "dapo": (["--algo", "dapo"], DAPO, 0.3),
    # TRL averages the entropy over tokens for every loss, slime as the loss is: here both mean the same.
    "entropy bonus": (["--algo", "dapo", "--entropy-coef", "0.05"], DAPO | {"entropy_coef": 0.05}, 0.3),
    "gspo": (
        ["--algo", "gspo"],
        GRPO | {"importance_sampling_level": "sequence", "epsilon": 3e-4, "epsilon_high": 4e-4},
        5e-3,
    ),
    # TRL's epsilon_high of CISPO is the bound itself, not its distance from 1, and it averages over tokens.
    "cispo": (
        ["--algo", "cispo", "--algo.aggregation", "token_mean"],
        GRPO | {"loss_type": "cispo", "epsilon_high": 5.0},
        2.0,
    ),
}


@pytest.mark.parametrize("variant", VARIANTS)
def test_group_relative_advantages_losses_and_gradients(trl_step, slime_step, variant):
    flags, options, gap = VARIANTS[variant]
    # Rewards in the millions: TRL adds 1e-4 to the standard deviation and slime 1e-6, both are then nothing.
    case = make_case(gap, reward_scale=2.0**20)
    theirs = trl_step(case, GRPOTrainer, GRPOConfig, **options)
    ours = slime_step(case, *flags)
    assert_same(ours.credit, theirs.credit)
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-6, abs=1e-7)
    assert_same(ours.gradient, theirs.gradient)
    assert_same(ours.entropy_gradient, theirs.entropy_gradient)
    # The case would test nothing if no token or every token clipped, or if the variant changed nothing.
    assert np.count_nonzero(theirs.credit) == 7
    credited = np.repeat(theirs.credit, case.lengths) * np.concatenate(case.mask) != 0
    stopped = credited & (theirs.gradient == 0)
    assert stopped.sum() < credited.sum() / 2
    assert stopped.any() or options["beta"] != 0 or variant == "cispo"
    plain = trl_step(case, GRPOTrainer, GRPOConfig, **GRPO)
    assert variant == "grpo" or np.abs(theirs.gradient - plain.gradient).max() > 1e-3 * np.abs(plain.gradient).max()


def test_trl_adds_more_to_the_standard_deviation(trl_step, slime_step):
    """TRL divides by std + 1e-4, slime by std + 1e-6: the whole difference between their advantages."""
    case = make_case(0.3)
    theirs = trl_step(case, GRPOTrainer, GRPOConfig, **GRPO)
    ours = slime_step(case, "--algo", "grpo")
    stds = np.zeros(len(case.rewards))
    for start in range(0, len(stds), GROUP_SIZE):
        scored = [reward for reward in case.rewards[start : start + GROUP_SIZE] if reward is not UNSCORED]
        stds[start : start + GROUP_SIZE] = statistics.stdev(scored) if len(scored) > 1 else 0.0
    assert_same(ours.credit * (stds + 1e-6), theirs.credit * (stds + 1e-4), 1e-12)
    assert np.abs(ours.credit / np.where(theirs.credit == 0, 1, theirs.credit) - 1).max() > 1e-4


# --- RLOO -------------------------------------------------------------------------------------------------------------

RLOO = {"epsilon": 0.2, "beta": 0.0, "normalize_advantages": False}


def test_leave_one_out_advantages(trl_step, slime_step):
    case = make_case(0.3, tools=False)
    theirs = trl_step(case, RLOOTrainer, RLOOConfig, **RLOO)
    assert_same(slime_step(case, "--algo", "rloo").credit, theirs.credit, 1e-12)
    assert np.count_nonzero(theirs.credit) == 7


def test_rloo_of_responses_of_one_token(trl_step, slime_step):
    """TRL clips the ratio of whole responses, slime those of tokens: with one token in each there is no difference."""
    case = make_case(0.3, lengths=[1] * len(LENGTHS), tools=False)
    theirs = trl_step(case, RLOOTrainer, RLOOConfig, **RLOO)
    ours = slime_step(case, "--algo", "rloo")
    assert ours.loss == pytest.approx(theirs.loss, rel=1e-6)
    assert_same(ours.gradient, theirs.gradient)
    # Seven of them have an advantage, and some of those clip.
    assert 2 < np.count_nonzero(theirs.gradient) < 7


def test_rloo_on_policy_differs_in_its_divisor(trl_step, slime_step):
    """At a ratio of 1 nothing clips, and the gradients are REINFORCE's: summed over a response's tokens in TRL, averaged
    over them in slime (seq_mean), or divided by the longest allowed response (constant)."""
    case = make_case(0.0, tools=False)
    theirs = trl_step(case, RLOOTrainer, RLOOConfig, **RLOO)
    ours = slime_step(case, "--algo", "rloo")
    assert_same(ours.gradient * np.repeat(case.lengths, case.lengths), theirs.gradient)
    ours = slime_step(case, "--algo", "rloo", "--algo.aggregation", "constant")
    assert_same(ours.gradient * MAX_LEN, theirs.gradient)
    assert np.count_nonzero(theirs.gradient) > 15


def test_rloo_takes_no_kl_off_the_reward(slime_step):
    """TRL does (`beta`): it sums k1 over the response. Here the KL is a term of the loss, or there is none."""
    with pytest.raises(ConfigError, match="takes no KL in the reward"):
        slime_step(make_case(0.3), "--algo", "rloo", "--kl-coef", "0.1", "--kl-reward-type", "k1")
