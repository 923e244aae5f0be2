"""Setup of the engines in tests."""

from slime_core.contracts.setup import EngineSetup


def setup_for(model, run_dir, **more):
    settings = {"index": 0, "device": "cpu", "seed": 0, "max_context_len": 2048, "max_batch": 32, "transport": "direct"}
    return EngineSetup(model_path=model, run_dir=run_dir, **(settings | more))
