"""docs/algorithms.md lists every algorithm with what its plugin reports. Run as a script, this file writes the list."""

from pathlib import Path

from slime_core import groups
from slime_core.registry import Registry
from slime_plugin_kit.algorithm_card import algorithm_card, algorithms_page

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "algorithms.md"
BEGIN, END = "<!-- algorithms -->\n\n", "\n<!-- /algorithms -->\n"
OURS = {path.name for path in (ROOT / "plugins").iterdir()}


def listed() -> str:
    """What `slime plugins algorithms` prints, without its title."""
    registry = Registry()
    ours = [entry for entry in registry.entries(groups.ALGORITHMS) if entry.dist in OURS]
    return algorithms_page(registry, ours).partition("\n\n")[2]


def test_the_page_is_fresh():
    text = PAGE.read_text()
    assert text.partition(BEGIN)[2].partition(END)[0] == listed(), f"write it again: python {Path(__file__).name}"


def test_a_card_lists_the_options_that_the_recipe_sets():
    registry = Registry()
    card = algorithm_card(registry, registry.find(groups.ALGORITHMS, "dapo", where="algo.name"))
    assert [(part.slot, part.part.name) for part in card.parts] == [("advantage", "group_norm"), ("loss", "clip")]
    options = {option.name: option.default for part in card.parts for option in part.options}
    assert (options["eps_clip"], options["eps_clip_high"], options["eps_clip_c"]) == ("0.2", "0.28", "unset")
    assert card.needs == ["old_log_probs"]
    assert card.kernel_options == {"kl_loss_type": '"k3"'}


if __name__ == "__main__":
    before, begin, rest = PAGE.read_text().partition(BEGIN)
    PAGE.write_text(before + begin + listed() + END + rest.partition(END)[2])
