"""Rules for batch sizes: verl counts prompts, of which each has n samples, and micro-batches on each GPU."""

from __future__ import annotations

from slime_compat.peer import PeerTranslation
from slime_compat.verl.defaults import ACTOR, ROLLOUT


def batches(translation: PeerTranslation) -> None:
    prompts = translation.number("data.train_batch_size", int)
    samples = translation.number(f"{ROLLOUT}.n", int)
    mini = translation.number(f"{ACTOR}.ppo_mini_batch_size", int)
    translation.put("rollout.rollout_batch_size", prompts)
    translation.put("rollout.n_samples_per_prompt", samples)
    translation.put("train.global_batch_size", mini * samples)
    if mini > prompts or prompts % mini:
        translation.note(
            f"{ACTOR}.ppo_mini_batch_size",
            f"{mini}: the {prompts} prompts of data.train_batch_size must be a multiple of it; choose train.global_batch_size",
            trains=True,
        )
    epochs = translation.number(f"{ACTOR}.ppo_epochs", int)
    if epochs != 1:
        translation.note(
            f"{ACTOR}.ppo_epochs", f"{epochs}: a batch is trained on once here; use smaller mini-batches", trains=True
        )
    micro_batches(translation)


def micro_batches(translation: PeerTranslation) -> None:
    """Losses are counted over the whole optimizer step here, so these sizes change memory and speed alone."""
    per_gpu = translation.value(f"{ACTOR}.ppo_micro_batch_size_per_gpu")
    of_all = translation.value(f"{ACTOR}.ppo_micro_batch_size")
    tokens = translation.number(f"{ACTOR}.ppo_max_token_len_per_gpu", int)
    scored = translation.value(f"{ROLLOUT}.log_prob_max_token_len_per_gpu")
    dynamic = translation.switch(f"{ACTOR}.use_dynamic_bsz")
    translation.put("train.use_dynamic_batch_size", dynamic)
    if dynamic:
        translation.put("train.max_tokens_per_gpu", tokens)
        if scored is not None and scored != tokens:
            translation.put("train.log_probs_max_tokens_per_gpu", scored)
    elif per_gpu is not None:
        translation.put("train.micro_batch_size", translation.number(f"{ACTOR}.ppo_micro_batch_size_per_gpu", int))
    elif of_all is not None:
        translation.note(
            f"{ACTOR}.ppo_micro_batch_size", "a number for all GPUs; set train.micro_batch_size for one GPU"
        )
