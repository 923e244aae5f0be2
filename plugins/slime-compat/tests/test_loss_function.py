"""Loss functions that were written for upstream slime (--custom-loss-function-path)."""

from __future__ import annotations

import textwrap

import pytest
import torch

from slime_compat.plugin import CompatLoss, CompatRefLoss
from slime_core.contracts.loss import LossInputs
from slime_core.errors import PluginError
from slime_training.segments import LocalSegments

LENGTHS = (3, 0, 2, 4)
FUNCTIONS = """
    import torch
    from slime.backends.megatron_utils.cp_utils import all_gather_with_cp
    from slime.backends.megatron_utils.loss import get_log_probs_and_entropy

    def policy(args, batch, logits, sum_of_sample_mean):
        _, found = get_log_probs_and_entropy(
            logits, args=args, unconcat_tokens=batch["unconcat_tokens"], total_lengths=batch["total_lengths"],
            response_lengths=batch["response_lengths"], with_entropy=True,
        )
        log_probs = torch.cat(found["log_probs"], dim=0)
        advantages = torch.cat(batch["advantages"], dim=0)
        ratio = (log_probs - torch.cat(batch["log_probs"], dim=0)).exp()
        clipped = ratio.clamp(1 - args.eps_clip, 1 + args.eps_clip)
        pg_loss = sum_of_sample_mean(torch.maximum(-ratio * advantages, -clipped * advantages))
        entropy_loss = sum_of_sample_mean(torch.cat(found["entropy"], dim=0))
        loss = torch.tensor(1.0) * pg_loss - args.entropy_coef * entropy_loss
        loss += sum_of_sample_mean((log_probs - torch.cat(batch["ref_log_probs"], dim=0)).square()) * 0.5
        if log_probs.numel() == 0:
            loss += 0 * logits.sum()
        return loss, {"loss": loss.clone().detach(), "pg_loss": pg_loss.clone().detach(), "temperature": 2.0}

    def reads_logits(args, batch, logits, sum_of_sample_mean):
        return sum_of_sample_mean(logits.softmax(-1)), {}

    def root(args, batch, logits, sum_of_sample_mean):
        return sum_of_sample_mean(torch.cat(batch["log_probs"])).sqrt(), {}

    def root_of_torch(args, batch, logits, sum_of_sample_mean):
        return torch.sqrt(sum_of_sample_mean(torch.cat(batch["log_probs"]))), {}

    def penalty(args, batch, logits, sum_of_sample_mean):
        return sum_of_sample_mean(torch.cat(batch["log_probs"])) + 1.0, {}

    def own_mean(args, batch, logits, sum_of_sample_mean):
        return torch.cat(batch["log_probs"]).mean(), {}

    def prompts(args, batch, logits, sum_of_sample_mean):
        return sum(len(tokens) for tokens in batch["unconcat_tokens"]), {}

    def masks(args, batch, logits, sum_of_sample_mean):
        return batch["loss_masks"], {}

    def gathers(args, batch, logits, sum_of_sample_mean):
        return all_gather_with_cp(batch["log_probs"][0], 9, batch["response_lengths"][0]), {}

    def reference(args, batch, logits, sum_of_sample_mean):
        return batch["ref_log_probs"], {}
"""
ARGS = {"eps_clip": 0.2, "entropy_coef": 0.3}


@pytest.fixture
def folder(tmp_path, monkeypatch):
    (tmp_path / "loss_functions.py").write_text(textwrap.dedent(FUNCTIONS))
    monkeypatch.delitem(__import__("sys").modules, "loss_functions", raising=False)
    return str(tmp_path)


def drawn(lengths=LENGTHS):
    """float64 columns of one micro-batch, with some tokens masked; the sample of each token."""
    generator = torch.Generator().manual_seed(4)
    count = sum(lengths)
    names = ("log_probs", "old_log_probs", "ref_log_probs", "rollout_log_probs", "entropy", "advantages")
    columns = {name: torch.randn(count, generator=generator, dtype=torch.float64) for name in names}
    for name in ("log_probs", "entropy"):
        columns[name].requires_grad_()
    mask = torch.rand(count, generator=generator) < 0.7
    return LossInputs(mask=mask, **columns), torch.repeat_interleave(
        torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.long)
    )


def loss_of(folder, name, driver=CompatLoss):
    return driver.build(driver.Config(path=f"loss_functions.{name}", python_path=(folder,), args=ARGS))


def test_loss_and_gradient_are_upstreams(folder):
    """Upstream's reduction is the sum over samples of the mean over their trained tokens."""
    inputs, samples = drawn()
    output = loss_of(folder, "policy", CompatRefLoss)(inputs, LocalSegments(samples, len(LENGTHS)))
    trained = torch.bincount(samples[inputs.mask], minlength=len(LENGTHS)).clamp(min=1)
    weight = inputs.mask / trained[samples]
    of_run = (weight * output.values).sum()
    gradient = torch.autograd.grad(of_run, [inputs.log_probs, inputs.entropy])

    def mean(values):
        return sum((values * inputs.mask)[samples == sample].sum() / trained[sample] for sample in range(len(LENGTHS)))

    ratio = (inputs.log_probs - inputs.old_log_probs).exp()
    unclipped, clipped = -ratio * inputs.advantages, -ratio.clamp(0.8, 1.2) * inputs.advantages
    pg_loss = mean(torch.maximum(unclipped, clipped))
    expected = pg_loss - 0.3 * mean(inputs.entropy) + 0.5 * mean((inputs.log_probs - inputs.ref_log_probs) ** 2)
    torch.testing.assert_close(of_run, expected)
    torch.testing.assert_close(gradient, torch.autograd.grad(expected, [inputs.log_probs, inputs.entropy]))
    sums = {name: (weight * column).sum() for name, column in output.metrics.items()}
    torch.testing.assert_close(sums["pg_loss"], pg_loss.detach())
    torch.testing.assert_close(sums["loss"], expected.detach())
    # A number without tokens is one at each token.
    torch.testing.assert_close(
        sums["temperature"], torch.tensor(2.0 * len(samples[inputs.mask].unique()), dtype=torch.float64)
    )


def test_a_micro_batch_without_tokens_has_the_same_metrics(folder):
    full, samples = drawn()
    empty, none = drawn(())
    loss = loss_of(folder, "policy", CompatRefLoss)
    output = loss(empty, LocalSegments(none, 0))
    assert output.metrics.keys() == loss(full, LocalSegments(samples, len(LENGTHS))).metrics.keys()
    assert output.values.shape == (0,)
    output.values.sum().backward()


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("reads_logits", r"logits\.softmax: a loss has log-probs and entropies of response tokens here, and no logits"),
        ("root", r"sqrt: what sum_of_sample_mean returns can be added, and multiplied by a number"),
        ("root_of_torch", r"sqrt: what sum_of_sample_mean returns can be added, and multiplied by a number"),
        ("penalty", "the sum with a number that is no reduction: what sum_of_sample_mean returns can be added"),
        ("own_mean", "it must return the loss, a sum of what sum_of_sample_mean returns"),
        ("prompts", r'batch\["unconcat_tokens"\]: a loss has no prompts here'),
        ("reference", r'the batch has no ref_log_probs: name the loss "compat_ref"'),
    ],
)
def test_what_cannot_be_as_upstream_is_an_error_with_what_to_do(folder, name, message):
    inputs, samples = drawn()
    if name == "reference":
        inputs = LossInputs(mask=inputs.mask, log_probs=inputs.log_probs)
    with pytest.raises(PluginError, match=rf'algo\.loss\.path = "loss_functions\.{name}", call: .*{message}'):
        loss_of(folder, name)(inputs, LocalSegments(samples, len(LENGTHS)))


class HalfSamples(LocalSegments):
    """A context-parallel rank, whose samples are twice as long as its part."""

    def seq_sum(self, values):
        return 2 * super().seq_sum(values)


def test_a_rank_with_parts_of_samples_has_no_masks_of_them(folder):
    inputs, samples = drawn()
    for name, message in (
        ("masks", "with context parallelism a rank has parts"),
        ("gathers", "3 of the sample's 6 tokens"),
    ):
        with pytest.raises(PluginError, match=message):
            loss_of(folder, name)(inputs, HalfSamples(samples, len(LENGTHS)))
