"""The estimates of `slime plan`, against the bytes that optimizers hold after a step."""

import json

from slime_core.contracts.optimizer import ChosenOptimizer
from slime_fsdp.config import FsdpConfig
from slime_fsdp.memory import memory_of
from slime_plugin_kit.tiny_training import Place
from slime_training.memory_plan import STATE, MemoryPhase, TrainerLoad, bytes_at


def estimated(driver, keys, folder, **setup):
    chosen = ChosenOptimizer(driver=driver.driver, options=driver.options)
    given = Place(model=folder).setup(optimizer=keys, chosen_optimizer=chosen, **setup)
    return memory_of(FsdpConfig(), TrainerLoad(setup=given, tokens=8, scored_tokens=8, num_micro_batches=1))


def of_state(memory):
    """Bytes of lines that are held as long as a state, beside the weights."""
    return sum(line.num_bytes for line in memory.lines if line.moments == STATE)


def test_bytes_of_the_state_are_those_of_a_trainer(name, begin, tiny):
    trained = begin(name)
    trained.train(1)
    trainer = trained.backend._ready
    held = [value for state in trainer.optimizer.state.values() for value in state.values() if value.ndim]
    memory = estimated(trainer.setup.chosen_optimizer, trainer.setup.optimizer, tiny)
    assert of_state(memory) == sum(value.nbytes for value in held)
    assert not memory.not_estimated


def test_two_ranks_hold_half(name, ranks, begin, tiny):
    """And one more row where rows do not divide."""
    setup = begin(name).backend._ready.setup
    one, two = (of_state(estimated(setup.chosen_optimizer, setup.optimizer, tiny, world_size=n)) for n in (1, 2))
    assert two == max(rank["bytes"] for rank in ranks(f"{name}_backend"))
    assert 0.5 * one <= two < 0.6 * one


def test_the_4b_shape(name, begin, tmp_path):
    """GiB of state and of temporaries. AdamW has 30.0 GiB of moments here."""
    config = {"model_type": "qwen3", "vocab_size": 151936, "head_dim": 128, "num_key_value_heads": 8}
    config |= {"hidden_size": 2560, "num_hidden_layers": 36, "num_attention_heads": 32, "intermediate_size": 9728}
    (tmp_path / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    setup = begin(name).backend._ready.setup
    memory = estimated(setup.chosen_optimizer, setup.optimizer, tmp_path, device="cuda")
    expected, at_step = {"muon": (16.4, 0.2), "adamw_8bit": (7.6, 0.1)}[name]
    assert round(of_state(memory) / 2**30, 1) == expected
    at_work = bytes_at(memory.lines, MemoryPhase.STEP) - bytes_at(memory.lines, MemoryPhase.IDLE)
    gradients = sum(line.num_bytes for line in memory.lines if line.component == "gradients")
    assert round((at_work - gradients) / 2**30, 1) == at_step
