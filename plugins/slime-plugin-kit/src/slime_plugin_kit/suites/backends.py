"""Training backends, on a tiny random model, beside transformers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any, Final

import numpy as np
import pytest
import torch
from torch import Tensor

from slime_core.algorithm.loss import TokenObjective
from slime_core.contracts.backend import REFERENCE, OutOfDeviceMemory
from slime_core.contracts.example import BackendExample
from slime_core.contracts.optimizer import StepSettings
from slime_core.errors import CheckpointError, TrainingError
from slime_plugin_kit.case import Case
from slime_plugin_kit.compare import require_same, require_same_sums
from slime_plugin_kit.objectives import EVERY_NEED
from slime_plugin_kit.rank_server import RankServer
from slime_plugin_kit.tiny_model import load_plain, make_tiny_model, named_weights
from slime_plugin_kit.tiny_training import (
    ADAM,
    LARGE,
    OVERFLOWING,
    SPLITS,
    WHOLE,
    Opened,
    Place,
    SquaredError,
    TooLarge,
    TrainingBatch,
    objective_of,
    objective_with,
    opened,
)

KEY_OF_SETTING: Final = {"lr": "lr", "eps": "adam_eps", "weight_decay": "weight_decay", "clip_grad": "clip_grad"}
"""Fields of `StepSettings` and the keys of `OptimizerConfig`, where a value is one key."""
FLOAT32 = 2e-5
"""What sums in another order may differ by, relative to the largest number; in log-probs, nats."""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("model") / "tiny")


@pytest.fixture(scope="module")
def training() -> TrainingBatch:
    return TrainingBatch.make()


@pytest.fixture(scope="module")
def rank_server() -> Iterator[RankServer]:
    server = RankServer()
    yield server
    server.close()


def one_step(case: Case, model: Path, training: TrainingBatch, split: Any = WHOLE) -> tuple[dict[str, Tensor], Any]:
    """The gradient, as what a step of plain descent takes off the weights, and the step's report."""
    with opened(case.build(), Place(model=model)) as one:
        before = one.weights()
        report = one.backend.train_step(training.micros(split), objective_of())
        after = one.weights()
    return {name: before[name] - after[name] for name in before}, report


def require_same_weights(what: str, got: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """To the bit."""
    assert list(got) == list(expected), f"{what}: tensors {sorted(set(got) ^ set(expected))} are only in one of them"
    wrong = [name for name, tensor in expected.items() if not torch.equal(got[name], tensor)]
    assert not wrong, f"{what}: {len(wrong)} of {len(expected)} tensors differ, first {wrong[0]}"


def require_close(what: str, got: dict[str, Tensor], expected: dict[str, Tensor], tolerance: float) -> None:
    """Relative to the largest number of all tensors."""
    assert set(got) == set(expected), f"{what}: tensors {sorted(set(got) ^ set(expected))} are only in one of them"
    scale = max(float(tensor.abs().max()) for tensor in expected.values())
    for name, tensor in expected.items():
        apart = float((got[name].double() - tensor.double()).abs().max())
        assert apart <= tolerance * scale, f"{what}: {name} is off by {apart:.3g}, where the largest is {scale:.3g}"


def test_log_probs_equal_those_of_transformers(case: Case, model: Path, training: TrainingBatch) -> None:
    with torch.no_grad():
        log_probs, entropy = (column.numpy() for column in training.by_transformers(load_plain(model)))
    with opened(case.build(), Place(model=model)) as one:
        for split in (WHOLE, *SPLITS):
            got = one.scores(training, split, entropy=True)
            for name, expected in {"log_probs": log_probs, "entropy": entropy}.items():
                apart = np.abs(got[name] - expected).max()
                assert apart <= FLOAT32, f"{name} in micro-batches {split} are off by {apart:.3g} nats"


def test_gradients_equal_those_of_transformers(case: Case, model: Path, training: TrainingBatch) -> None:
    gradient, report = one_step(case, model, training)
    expected = training.gradients_by_transformers(load_plain(model))
    require_close("gradient", gradient, expected, tolerance=1e-4)
    norm = float(torch.stack([tensor.norm() for tensor in expected.values()]).norm())
    require_same("the reported norm of the gradient", report.grad_norm, norm, tolerance=1e-4)


def test_micro_batches_change_nothing(case: Case, model: Path, training: TrainingBatch) -> None:
    expected, whole = one_step(case, model, training)
    for split in SPLITS:
        got, report = one_step(case, model, training, split)
        require_close(f"gradient in micro-batches {split}", got, expected, FLOAT32)
        require_same_sums(f"micro-batches {split}", report.sums, whole.sums, tolerance=1e-4)


def test_a_step_repeats_to_the_bit(case: Case, model: Path, training: TrainingBatch) -> None:
    first, _ = one_step(case, model, training, SPLITS[0])
    second, _ = one_step(case, model, training, SPLITS[0])
    require_same_weights("the same step from a new start", second, first)


def test_any_layout_trains_as_one_rank(
    case: Case, model: Path, training: TrainingBatch, rank_server: RankServer, tmp_path: Path
) -> None:
    world_size = max(
        [2, case.driver.min_world_size(case.config), *(e.world_size for e in case.examples(BackendExample))]
    )
    request = {
        "part": case.part.spec().to_json(),
        "files": [str(file.path) for file in case.subject.registry.plugin_files],
        "model": str(model),
        "out": str(tmp_path),
        "world_size": world_size,
    }
    rank_server.run(request)
    ranks = [torch.load(tmp_path / f"rank_{rank}.pt", weights_only=True) for rank in range(world_size)]

    plain = load_plain(model)
    with torch.no_grad():
        expected = training.by_transformers(plain)[0].numpy()
    found = np.full(len(expected), np.nan)
    for rank in ranks:
        of_rank = rank["log_probs"].numpy()
        held = ~np.isnan(of_rank)
        found[held] = of_rank[held]
    apart = np.abs(found - expected).max()
    assert apart <= FLOAT32, (
        f"log-probs of {world_size} ranks are off by {apart:.3g} nats (NaN: no rank held the token)"
    )

    # One rank's step, by transformers: this layout may not be possible on one.
    before = {name: tensor.clone() for name, tensor in named_weights(load_plain(model, torch.float32)).items()}
    gradient = {name: before[name] - tensor for name, tensor in ranks[0]["weights"].items()}
    require_close(
        f"gradient of {world_size} ranks", gradient, training.gradients_by_transformers(plain), tolerance=1e-4
    )
    assert not any(rank["weights"] for rank in ranks[1:]), "another rank than the first exports weights"
    reported = {rank["nonfinite"] for rank in ranks}
    assert None not in reported, "after a step whose weights overflow, a rank reports no `nonfinite`"
    assert len(reported) == 1, f"after a step whose weights overflow, the ranks do not report the same: {reported}"
    sums: dict[str, float] = {}
    for rank in ranks:
        for name, value in rank["sums"].items():
            sums[name] = sums.get(name, 0.0) + value
    _, entropy = training.by_transformers(plain)
    weight = torch.from_numpy(np.asarray(training.columns.loss_weight, np.float64))
    require_same("entropy_loss over all ranks", sums["entropy_loss"], float(weight @ entropy.detach()), tolerance=1e-4)


def steps(one: Opened, training: TrainingBatch, count: int) -> list[float]:
    """Norms of the gradients, a different split each time."""
    micros = [training.micros(split) for split in (WHOLE, *SPLITS)]
    return [one.backend.train_step(micros[n % len(micros)], objective_of()).grad_norm for n in range(count)]


def test_saved_and_loaded_it_continues_to_the_bit(
    case: Case, model: Path, training: TrainingBatch, tmp_path: Path
) -> None:
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    with opened(case.build(), Place(model=model), optimizer=ADAM) as straight:
        steps(straight, training, 2)
        straight.backend.save(folder)
        halfway = straight.weights()
        norms = steps(straight, training, 2)
        expected = straight.weights()
    with opened(case.build(), Place(model=model), optimizer=ADAM) as resumed:
        steps(resumed, training, 1)
        resumed.backend.load(folder)
        require_same_weights("loaded weights", resumed.weights(), halfway)
        assert steps(resumed, training, 2) == norms, "the first steps after a load have other gradients"
        require_same_weights("2 steps, saved, loaded, and 2 more, beside 4 steps", resumed.weights(), expected)
    slower = ADAM.model_copy(update={"lr": ADAM.lr / 8})
    with opened(case.build(), Place(model=model), optimizer=slower) as resumed:
        resumed.backend.load(folder)
        report = resumed.backend.train_step(training.micros(), objective_of())
        assert report.lr == slower.lr, f"after a load, the learning rate is {report.lr}, not {slower.lr}, which was set"


def test_what_is_staged_is_of_that_instant(case: Case, model: Path, training: TrainingBatch, tmp_path: Path) -> None:
    folder = tmp_path / "staged"
    folder.mkdir()
    with opened(case.build(), Place(model=model), optimizer=ADAM) as straight:
        steps(straight, training, 2)
        write = straight.backend.stage(folder)
        steps(straight, training, 2)
        write()
        expected = straight.weights()
    with opened(case.build(), Place(model=model), optimizer=ADAM) as resumed:
        resumed.backend.load(folder)
        steps(resumed, training, 2)
        require_same_weights("2 steps, staged, written later, loaded, and 2 more", resumed.weights(), expected)


def test_an_incomplete_checkpoint_is_refused(case: Case, model: Path, training: TrainingBatch, tmp_path: Path) -> None:
    empty, cut = tmp_path / "empty", tmp_path / "cut"
    empty.mkdir()
    cut.mkdir()
    with opened(case.build(), Place(model=model), optimizer=ADAM) as one:
        steps(one, training, 1)
        before = one.weights()
        with pytest.raises(CheckpointError):
            one.backend.load(empty)
        one.backend.save(cut)
        largest = max((path for path in cut.rglob("*") if path.is_file()), key=lambda path: path.stat().st_size)
        largest.write_bytes(largest.read_bytes()[: largest.stat().st_size // 2])
        with pytest.raises(CheckpointError):
            one.backend.load(cut)
        require_same_weights("after a load that was refused", one.weights(), before)


def test_export_equals_what_transformers_loads(
    case: Case, model: Path, training: TrainingBatch, tmp_path: Path
) -> None:
    with opened(case.build(), Place(model=model)) as one:
        require_same_weights("exported at the start", one.weights(), ordered(one, load_plain(model, torch.float32)))
        one.backend.train_step(training.micros(), objective_of())
        for size in (1, 1 << 30):
            exported = one.weights(version=3, bucket_bytes=size)
            require_same_weights(f"in buckets of {size} bytes", exported, one.weights())
        one.backend.save_hf(tmp_path)
        saved = load_plain(tmp_path, torch.float32)
        require_same_weights("exported, beside the saved folder", exported, ordered(one, saved))


def ordered(one: Opened, model: Any) -> dict[str, Tensor]:
    """A model's weights in the order of the export, with what only one of the two has at the end."""
    weights = named_weights(model)
    order = [name for name in one.weights() if name in weights]
    return {name: weights[name] for name in [*order, *sorted(set(weights) - set(order))]}


def test_a_step_that_is_not_finite_changes_nothing(case: Case, model: Path, training: TrainingBatch) -> None:
    with opened(case.build(), Place(model=model), optimizer=ADAM) as straight:
        steps(straight, training, 2)
        expected = straight.weights()
    with opened(case.build(), Place(model=model), optimizer=ADAM) as one:
        steps(one, training, 1)
        before = one.weights()
        for poison in (float("nan"), float("inf")):
            report = one.backend.train_step(training.micros(), objective_of(poison))
            assert report.skipped, f"a loss of {poison} is not reported as skipped"
            require_same_weights(f"after a loss of {poison}", one.weights(), before)
        report = one.backend.train_step(training.micros(SPLITS[0]), objective_of())
        assert not report.skipped, "the step after a skipped one is skipped too"
        # Optimizer and schedule have not moved either.
        require_same_weights("after a step, two skipped ones and a step", one.weights(), expected)


def test_a_micro_batch_without_memory_changes_nothing(case: Case, model: Path, training: TrainingBatch) -> None:
    split = SPLITS[0]
    tokens = [len(micro.targets) for micro in training.micros(split)]
    largest = tokens.index(max(tokens))
    with opened(case.build(), Place(model=model), optimizer=ADAM) as straight:
        steps(straight, training, 2)
        expected = straight.weights()
    for in_backward in (False, True):
        with opened(case.build(), Place(model=model), optimizer=ADAM) as one:
            steps(one, training, 1)
            before = one.weights()
            loss = TooLarge(max(tokens) - 1, in_backward=in_backward)
            with pytest.raises(OutOfDeviceMemory) as caught:
                one.backend.train_step(training.micros(split), objective_with(loss))
            assert caught.value.number == largest, (
                f"micro-batch {caught.value.number} is named, and {largest} does not fit"
            )
            require_same_weights("after a micro-batch without memory", one.weights(), before)
            one.backend.train_step(training.micros(split), objective_of())
            # Gradients of the micro-batches before it are gone, and optimizer and schedule have not moved.
            require_same_weights("after a step, one without memory and a step", one.weights(), expected)


def test_gradients_add_up_until_the_optimizer_steps(case: Case, model: Path, training: TrainingBatch) -> None:
    split = SPLITS[0]
    with opened(case.build(), Place(model=model), optimizer=ADAM) as straight:
        expected = [straight.backend.train_step(training.micros(split), objective_of()) for _ in range(2)]
        weights = straight.weights()
    with opened(case.build(), Place(model=model), optimizer=ADAM) as one:
        for step in expected:
            before = one.weights()
            for micro in training.micros(split):
                one.backend.forward_backward([micro], objective_of())
                # Log-probs between two calls change nothing.
                one.scores(training)
            require_same_weights("after forward_backward alone", one.weights(), before)
            report = one.backend.optim_step()
            require_same("the norm of gradients of several calls", report.grad_norm, step.grad_norm, tolerance=1e-4)
            require_same_sums("several calls of forward_backward", report.sums, step.sums, tolerance=1e-4)
        # Adam divides by the root of squares: differences of gradients count more.
        require_close("weights after steps of several calls", one.weights(), weights, tolerance=1e-3)
        with pytest.raises(TrainingError, match="forward_backward first"):
            one.backend.optim_step()


def test_the_settings_of_a_step_are_those_of_its_call(case: Case, model: Path, training: TrainingBatch) -> None:
    given = StepSettings(lr=0.03, betas=(0.6, 0.7), eps=1e-3, weight_decay=0.3, clip_grad=0.05)
    kept = case.driver.step_settings
    assert "lr" in kept, f"step_settings = {sorted(kept)}: every backend takes lr from a call"
    settings = StepSettings(**{name: getattr(given, name) for name in kept})
    as_given = {KEY_OF_SETTING[name]: value for name, value in asdict(settings).items() if name in KEY_OF_SETTING}
    as_given |= {} if settings.betas is None else {"adam_beta1": settings.betas[0], "adam_beta2": settings.betas[1]}
    as_given = {name: value for name, value in as_given.items() if value is not None}
    plain = ADAM.model_copy(update={"lr_warmup_iters": 0, "lr_decay_style": "constant"})
    with opened(case.build(), Place(model=model), optimizer=plain.model_copy(update=as_given)) as one:
        one.backend.train_step(training.micros(), objective_of())
        expected = one.weights()
    with opened(case.build(), Place(model=model), optimizer=plain) as one:
        one.backend.forward_backward(training.micros(), objective_of())
        report = one.backend.optim_step(settings)
        assert report.lr == pytest.approx(0.03), f"the report of a step with lr = 0.03 has {report.lr}"
        require_same_weights(f"a step with {settings}, beside a run with these settings", one.weights(), expected)
        before = one.weights()
        one.backend.forward_backward(training.micros(), objective_of())
        assert one.backend.optim_step(StepSettings(lr=0.0)).lr == 0, "the report of a step with lr = 0 has another"
        require_same_weights("a step with lr = 0", one.weights(), before)
        one.backend.forward_backward(training.micros(), objective_of())
        lr = one.backend.optim_step().lr
        assert lr == pytest.approx(plain.lr), (
            f"after steps with a lr of their own the schedule's is {lr}, not {plain.lr}"
        )


def test_weights_that_overflow_are_reported(case: Case, model: Path, training: TrainingBatch) -> None:
    with opened(case.build(), Place(model=model), optimizer=OVERFLOWING) as one:
        report = one.backend.train_step(training.micros(), objective_of(factor=LARGE))
        assert not report.skipped, "a step with a finite loss and gradient is reported as skipped"
        overflown = [name for name, tensor in one.weights().items() if not tensor.isfinite().all()]
        assert overflown, "the test is of no use: every weight is finite"
        assert report.nonfinite is not None, (
            f"{len(overflown)} weights are not finite after a step, such as {overflown[0]}, and the report has no `nonfinite`"
        )


def test_copies_stay_frozen(case: Case, model: Path, training: TrainingBatch) -> None:
    with opened(case.build(), Place(model=model), frozen_models={REFERENCE: model}) as one:
        at_start = one.scores(training)["log_probs"]
        require_same("the reference's log-probs", reference(one, training), at_start, tolerance=0)
        one.backend.train_step(training.micros(), objective_of())
        trained = one.scores(training)["log_probs"]
        assert np.abs(trained - at_start).max() > 1e-3, "a step changes nothing"
        require_same("the reference's log-probs after a step", reference(one, training), at_start, tolerance=0)
        one.backend.update_frozen_model(REFERENCE)
        require_same("the reference's log-probs, refreshed", reference(one, training), trained, tolerance=0)
        one.backend.train_step(training.micros(), objective_of())
        require_same("the refreshed reference's log-probs", reference(one, training), trained, tolerance=0)


def reference(one: Opened, training: TrainingBatch) -> Any:
    return one.scores(training, weights=REFERENCE)["log_probs"]


def test_sleep_loses_nothing(case: Case, model: Path, training: TrainingBatch) -> None:
    results = []
    for sleeps in (False, True):
        with opened(case.build(), Place(model=model), optimizer=ADAM) as one:
            steps(one, training, 1)
            if sleeps:
                trained = one.weights()
                nap(one, trained)
                nap(one, trained)
            steps(one, training, 1)
            results.append(one.weights())
    require_same_weights("a step, two naps and a step, beside two steps", results[1], results[0])


def nap(one: Opened, trained: dict[str, Tensor]) -> None:
    """In the order of a run that shares its devices with engines."""
    one.backend.sleep(keep_weights=True)
    require_same_weights("the weights alone", one.weights(), trained)
    one.backend.sleep()
    one.backend.wake_up(weights_only=True)
    require_same_weights("the weights alone, after sleep", one.weights(), trained)
    one.backend.sleep()
    one.backend.wake_up()
    one.backend.free_cache()
    require_same_weights("the weights after sleep", one.weights(), trained)


def test_layouts_cover_the_ranks(case: Case) -> None:
    least = case.driver.min_world_size(case.config)
    for world_size in (least, 2 * least, 4 * least):
        layouts = [case.driver.layout(case.config, rank, world_size) for rank in range(world_size)]
        label = f"with {world_size} ranks the layouts are {layouts}"
        sizes = {(layout.dp_size, layout.cp_size) for layout in layouts}
        assert len(sizes) == 1, f"{label}: ranks disagree about their number"
        (dp_size, cp_size), *_ = sizes
        reporting = sorted((layout.dp_rank, layout.cp_rank) for layout in layouts if layout.reports)
        expected = [(dp_rank, cp_rank) for dp_rank in range(dp_size) for cp_rank in range(cp_size)]
        assert reporting == expected, f"{label}: each part of the tokens is to be reported by one rank"


def test_a_critic_learns(case: Case, model: Path, training: TrainingBatch) -> None:
    objective = TokenObjective(loss=SquaredError(), needs=EVERY_NEED, reads_values=True)
    adam = replace_lr(0.01)
    with opened(case.build(), Place(model=model), head="value", optimizer=adam) as one:
        values = one.scores(training)["values"]
        assert np.isfinite(values).all(), "the values are not finite"
        losses = [one.backend.train_step(training.micros(split), objective).sums["loss"] for split in (WHOLE, *SPLITS)]
        losses += [one.backend.train_step(training.micros(), objective).sums["loss"] for _ in range(3)]
        assert losses[-1] < 0.9 * losses[0], f"its squared error goes from {losses[0]:.4g} to {losses[-1]:.4g}"


def replace_lr(lr: float) -> Any:
    return ADAM.model_copy(update={"lr": lr, "lr_warmup_iters": 0, "lr_decay_style": "constant"})
