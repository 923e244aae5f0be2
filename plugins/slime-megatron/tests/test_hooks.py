"""Functions of upstream slime that trainers call (`backend.hooks`), in one rank and in two."""

from pathlib import Path

import pytest

from slime_core.errors import PluginError
from slime_megatron.plugin import Megatron
from slime_plugin_kit.tiny_model import make_tiny_model
from slime_plugin_kit.tiny_training import Place, TrainingBatch, objective_of, opened

pytestmark = pytest.mark.megatron

ADDED = 0.25
"""By `old_trainer_hooks.before_train_step`, which needs Megatron."""
HERE = str(Path(__file__).parent)
NORM = "model.norm.weight"
INIT, LOG_PROB, TRAIN_STEP = (
    "megatron_init_path",
    "megatron_before_log_prob_hook_path",
    "megatron_before_train_step_hook_path",
)


def options(*, lr_factor=None, adds_gradients=False, args=(), **paths):
    """Of the backend, with hooks."""
    given = {"lr_factor": lr_factor, "adds_gradients": adds_gradients, **dict(args)}
    return {"hooks": {"name": "compat", "python_path": [HERE], "args": given, **paths}}


ALL = {
    INIT: "old_trainer_hooks.init",
    LOG_PROB: "old_trainer_hooks.before_log_prob",
    TRAIN_STEP: "old_trainer_hooks.before_train_step",
}


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return Place(model=make_tiny_model(tmp_path_factory.mktemp("model") / "tiny"))


def step(place, **more):
    """Weights before and after two optimizer steps, the last report, and what the hooks saw."""
    training = TrainingBatch.make()
    with opened(Megatron.build(Megatron.Config(**more)), place, frozen_models={"reference": place.model}) as one:
        for weights in ("actor", "reference"):
            one.scores(training, weights=weights)
        one.backend.begin_rollout(7)
        before = one.weights()
        reports = [one.backend.train_step(training.micros(), objective_of()) for _ in range(2)]
        hooks = one.backend._trainer.hooks
        return before, one.weights(), reports[-1], None if hooks is None else hooks._args.seen


@pytest.fixture(scope="module")
def plain(place):
    return step(place)


def test_they_are_called_with_upstreams_arguments(place, plain):
    before, after, report, seen = step(place, **options(**ALL))
    norm = pytest.approx(float(before[NORM].sum()))
    assert seen == [
        ("init", 0, 1, 5),
        ("log_prob", "", False, norm),
        ("log_prob", "ref_", False, norm),
        ("train_step", 7, 0, True),
        ("train_step", 7, 1, True),
    ]
    assert report.lr == plain[2].lr
    for name, tensor in plain[1].items():
        assert after[name].equal(tensor), name


def test_a_hook_sets_the_learning_rate_of_the_step(place):
    before, after, report, _ = step(place, **options(lr_factor=0.0, **ALL))
    assert report.lr == 0
    assert report.grad_norm > 0
    for name, tensor in before.items():
        assert after[name].equal(tensor), name


def test_a_hook_adds_to_the_gradient_a_mean_over_ranks(place, run_hooked):
    """Plain descent at learning rate 1: what a step takes off the weights is the gradient."""
    norms = {}
    for name, added in (("plain", False), ("hooked", True)):
        first, _ = run_hooked(name, options(adds_gradients=added, **ALL), place.model)
        norms[name] = first["before"][NORM] - first["after"][NORM]
    assert (norms["hooked"] - norms["plain"] - ADDED * (1 + 2) / 2).abs().max() < 1e-6


@pytest.fixture
def run_hooked(tmp_path):
    from conftest import run_layouts

    def run(name, given, model):
        return run_layouts(tmp_path, {name: {"model": str(model), "world_size": 2, "options": given}}).ranks(name)

    return run


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (
            options(**{INIT: "old_trainer_hooks.set_size"}),
            r'megatron_init_path = "old_trainer_hooks\.set_size", call: raised AttributeError: args\.hidden_size '
            "cannot be set: the backend does not read args",
        ),
        (
            options(**{INIT: "old_trainer_hooks.fail"}),
            r'megatron_init_path = "old_trainer_hooks\.fail", call: raised RuntimeError: no such device \(.*trainer_hooks',
        ),
        (
            options(**{LOG_PROB: "old_trainer_hooks.init"}),
            r'before_log_prob_hook_path = "old_trainer_hooks\.init": it takes \(args\), and is called as '
            r"\(args, model, store_prefix\)",
        ),
        (
            options(adds_gradients=True, args={"calculate_per_token_loss": True}, **ALL),
            r'"old_trainer_hooks\.before_train_step", what it adds to gradients: .* --calculate-per-token-loss',
        ),
    ],
    ids=["sets-an-option", "raises", "form", "per-token"],
)
def test_what_cannot_be_as_upstream_is_an_error(place, given, message):
    with pytest.raises(PluginError, match=message):
        step(place, **given)
