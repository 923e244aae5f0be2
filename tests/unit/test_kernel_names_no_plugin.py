"""The kernel knows no plugin, algorithm or backend by name: the config names them."""

import re
from pathlib import Path

import slime_core
from slime_core import groups
from slime_core.registry.install_hints import DISTRIBUTION_OF

KERNEL = Path(slime_core.__file__).parent
# What to install for a name; and what folders of runs by 0.1 call plugins, which their manifests name.
EXEMPT = ("registry/install_hints.py", "controller/earlier_names.py")

# Names that are also plain words, or part of a contract's own vocabulary.
PLAIN_WORDS = {
    "accepted",
    "adapter",
    "adam",
    "chat",
    "clip",
    "compare",
    "config",
    "convert",
    "delta",
    "direct",
    "disk",
    "distributed",
    "eval",
    "files",
    "frozen",
    "group_baseline",
    "hf",
    "image",
    "length",
    "local",
    "math",
    "mis",
    "models",
    "new",
    "plan",
    "pool",
    "priority",
    "random",
    "record",
    "remote",
    "replay",
    "retry",
    "served",
    "serve",
    "sft",
    "stream",
    "sums",
    "tis",
    "value",
    "video",
    "view",
}
# What plugins wrap, and what users call them.
WRAPPED = {"fsdp2", "vllm", "trl", "verl", "deepspeed", "ppo2", "search-r1", "dr-grpo", "wandb"}


def forbidden():
    # Those of the library are attributes of slime_core.
    of_plugins = [dists for group, dists in DISTRIBUTION_OF.items() if group != groups.LIBRARY]
    names = {name for dists in of_plugins for names in dists.values() for name in names}
    # An extra is the kernel's own.
    dists = {dist for dists in DISTRIBUTION_OF.values() for dist in dists if "[" not in dist}
    return (names - PLAIN_WORDS) | dists | {dist.replace("-", "_") for dist in dists} | WRAPPED


def named_in(text, names):
    pattern = re.compile(
        rf"(?<![\w-])({'|'.join(map(re.escape, sorted(names, key=len, reverse=True)))})(?![\w-])", re.I
    )
    return [match.group(0) for match in pattern.finditer(text)]


def test_the_kernel_names_no_plugin():
    found = []
    for path in sorted(KERNEL.rglob("*.py")):
        where = path.relative_to(KERNEL).as_posix()
        if not where.startswith(EXEMPT):
            for number, line in enumerate(path.read_text().splitlines(), 1):
                found += [f"slime_core/{where}:{number}: {name}" for name in named_in(line, forbidden())]
    assert not found, "\n".join(found)


def test_the_search_would_notice():
    names = forbidden()
    assert {"gspo", "fsdp", "megatron", "sglang", "slime-grpo", "slime_grpo"} <= names
    assert named_in('if algo.name == "gspo" or backend is FSDP:', names) == ["gspo", "FSDP"]
    assert not named_in("fsdp_like regspo k30", names)
