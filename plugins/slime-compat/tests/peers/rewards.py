"""Reward functions of TRL, for prompts that are messages."""


def right(prompts, completions, solution, **columns):
    assert prompts[0][0]["role"] == "user"
    return [float(completion[0]["content"].startswith(a)) for completion, a in zip(completions, solution, strict=True)]


def short(completions, **columns):
    return [None if len(completion[0]["content"]) > 3 else 0.5 for completion in completions]
