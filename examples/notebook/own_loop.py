"""A loop of one's own, as a marimo notebook: marimo edit examples/notebook/own_loop.py"""

import marimo

app = marimo.App(width="medium")


@app.cell
def _():
    import sys
    from pathlib import Path

    import marimo as mo
    import matplotlib.pyplot as plt

    import slime_core

    return Path, mo, plt, slime_core, sys


@app.cell
def _(mo):
    mo.md("""
    # Your own loop

    The run file of the arithmetic example names model, data, trainer, engine and reward. `open_session` starts them, here with
    smaller steps, and the loop below drives them. Another engine, backend or launcher is another line in the run file: the
    loop stays.
    """)


@app.cell
def _(Path, slime_core, sys):
    # python own_loop.py --runs-dir FOLDER --num-steps N, or in a notebook the defaults.
    words = dict(zip(sys.argv[1::2], sys.argv[2::2], strict=False)) if __name__ == "__main__" else {}
    num_steps = int(words.get("--num-steps", 24))
    session = slime_core.open_session(
        Path(__file__).parents[1] / "arithmetic/run.toml",
        overrides={
            "name": "notebook",
            "runs_dir": words.get("--runs-dir", "runs"),
            "rollout.rollout_batch_size": 96,
            "train.num_rollout": num_steps,
            "train.num_steps_per_rollout": 1,
            "train.lr_warmup_iters": 4,
            "trackers": ["jsonl"],
        },
        fresh=True,
    )
    return num_steps, session


@app.cell
def _(mo):
    mo.md("""
    ## Before training

    The warm start has seen worked examples. It knows the form of an answer, and a little of the arithmetic.
    """)


@app.cell
def _(mo, session):
    def shown(groups):
        """A row for the first response to each prompt."""
        return mo.ui.table(
            [
                {"prompt": group.prompt.text, "response": group.samples[0].response, "reward": group.samples[0].reward}
                for group in groups
            ],
            selection=None,
        )

    before = session.score(session.sample(8, n_samples=1))
    shown(before)
    return before, shown


@app.cell
def _(mo):
    mo.md("""
    ## The loop

    `sample` generates, `score` gives rewards, `credit` computes advantages by the recipe (GRPO), `forward_backward` adds
    gradients, `optim_step` takes a step with a learning rate of our own, and `update_weights` gives the engine the new policy.
    """)


@app.cell
def _(before, mo, num_steps, session):
    curve = []
    for step in mo.status.progress_bar(range(num_steps), title="training"):
        groups = session.score(session.sample(96))
        batch = session.credit(groups)
        session.forward_backward(batch)
        report = session.optim_step(lr=1e-3 * min(1.0, (step + 1) / 4))
        session.update_weights()
        rewards = [sample.reward for group in groups for sample in group.samples]
        curve.append((session.step, sum(rewards) / len(rewards), report.grad_norm))
    assert before, "what the model wrote before, for comparison"
    return (curve,)


@app.cell
def _(curve, mo, plt):
    steps, reward, grad_norm = zip(*curve, strict=True)
    figure, axes = plt.subplots(1, 2, figsize=(9, 3), layout="constrained")
    axes[0].plot(steps, reward)
    axes[0].set(title="mean reward", xlabel="rollout step", ylim=(0, 1))
    axes[1].plot(steps, grad_norm)
    axes[1].set(title="norm of the gradient", xlabel="rollout step")
    mo.as_html(figure)
    return (figure,)


@app.cell
def _(mo):
    mo.md("""
    ## After training

    Prompts of our own, and a reward of our own: any function of a sample.
    """)


@app.cell
def _(curve, session, shown):
    def is_right(sample):
        """Whether the box holds the sum that the prompt asks for."""
        total = sum(map(int, sample.prompt.text.removesuffix("=").split("+")))
        return float(f"{{{total}}}" in sample.response)

    assert curve, "after the loop"
    after = session.score(session.sample(["123+456=", "700+200=", "111+222=", "345+604="], n_samples=1), is_right)
    shown(after)
    return (after,)


@app.cell
def _(after, mo, session):
    # `slime run` would continue from this checkpoint, and transformers loads the model.
    saved, model = session.save(), session.export()
    session.close()
    assert after, "after the last samples"
    mo.md(f"saved: {saved}, {model}")


if __name__ == "__main__":
    app.run()
