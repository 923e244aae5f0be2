"""What an engine of the tests is started with."""

from slime_core.contracts.engine import EngineSetup


def setup_for(model, run_dir, **more):
    settings = {"index": 0, "device": "cpu", "seed": 0, "max_context_len": 600, "max_batch": 32}
    return EngineSetup(model_path=model, run_dir=run_dir, **(settings | more))
