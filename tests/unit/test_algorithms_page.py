"""docs/algorithms.md is what the plugins say of themselves."""

from pathlib import Path

from slime_core import groups
from slime_core.registry import Registry
from slime_plugin_kit.algorithm_card import algorithms_page, recipe_card

ROOT = Path(__file__).parents[2]
OURS = {path.name for path in (ROOT / "plugins").iterdir()}


def test_the_page_is_fresh():
    registry = Registry()
    ours = [entry for entry in registry.entries(groups.ALGORITHMS) if entry.dist in OURS]
    page = (ROOT / "docs" / "algorithms.md").read_text()
    assert page == algorithms_page(registry, ours), "type: slime plugins algorithms > docs/algorithms.md"


def test_a_card_says_what_the_recipe_makes_of_its_parts():
    registry = Registry()
    card = recipe_card(registry, registry.find(groups.ALGORITHMS, "dapo", where="algo.name"))
    assert [(part.slot, part.part.name) for part in card.parts] == [("advantage", "group_norm"), ("loss", "clip")]
    options = {option.name: option.default for part in card.parts for option in part.options}
    assert (options["eps_clip"], options["eps_clip_high"], options["eps_clip_c"]) == ("0.2", "0.28", "unset")
    assert card.needs == ["old_log_probs"]
    assert card.kernel_options == {"kl_loss_type": '"k3"'}
