"""`slime eval`: the evaluation sets alone."""

from __future__ import annotations

import typer


def evaluate(context: typer.Context) -> None:
    """Evaluates the run file's model, or with --resume FOLDER a run's newest checkpoint; trains nothing."""
    words = list(context.args)
    if not words or "--help" in words:
        typer.echo(
            "usage: slime eval run.toml [--flag value ...]\n\n"
            "Evaluates model.hf_checkpoint on the run file's evaluation sets and prints the metrics as JSON.\n"
            "--hf-checkpoint FOLDER evaluates another model, such as runs/NAME/hf."
        )
        return
    from slime_core.cli.evaluating import evaluate_words

    evaluate_words(words)
