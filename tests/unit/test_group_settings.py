"""Sampling settings of training and evaluation sets from one run file."""

from slime_core.controller.group_settings import eval_settings, training_settings

SETS = "[eval.datasets]\nt = 't.jsonl'\n"


def test_an_evaluation_without_settings_samples_as_training_does(bound):
    """Compares every field, so that the test fails for a new one."""
    flags = "--rollout-temperature 0.7 --rollout-max-response-len 9 --rollout-stop-token-ids 5 --rollout-skip-special-tokens"
    run = bound(*flags.split(), "--rollout-stop", "end", extra=SETS)
    (only_set,) = run.evals
    trained, evaluated = training_settings(run), eval_settings(run, only_set)
    assert evaluated.sampling == trained.sampling
    assert evaluated.sampling.skip_special_tokens
    assert evaluated.sampling.stop == ("end",)
    assert (trained.scope, evaluated.scope) == ("train", "eval-t")
    assert (trained.evaluation, evaluated.evaluation) == (False, True)
    assert (trained.num_samples, evaluated.num_samples) == (run.config.rollout.n_samples_per_prompt, 1)


def test_a_set_samples_by_its_own_settings(bound):
    run = bound(
        extra=SETS.replace("'t.jsonl'", "{ path = 't.jsonl', temperature = 0, min_new_tokens = 2, stop = ['x'] }")
    )
    (only_set,) = run.evals
    sampling = eval_settings(run, only_set).sampling
    assert (sampling.temperature, sampling.min_new_tokens, sampling.stop) == (0, 2, ("x",))
    assert training_settings(run).sampling.stop == ()
