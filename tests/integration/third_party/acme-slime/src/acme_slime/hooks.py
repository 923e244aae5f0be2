"""An observer that writes one line for each thing it hears of, to acme.log in the run's folder."""

from slime_core.contracts.hookspecs import hookimpl


def note(event, text):
    with (event.run.run_dir / "acme.log").open("a") as log:
        log.write(text + "\n")


@hookimpl
def run_start(event):
    note(event, f"run_start {event.run.name}")


@hookimpl
def step_trained(event):
    note(event, f"step_trained {event.rollout_id} {event.report.version}")


@hookimpl
def run_end(event):
    note(event, f"run_end {event.rollout_id} {type(event.error).__name__}")
