"""Replacements of upstream modules that old functions import.

Those in REPLACED are used also where upstream slime is installed: its `post` would call a router that this run does not have.
Those in WITHOUT_UPSTREAM are used only where it is not; all other modules are imported from the installed package.
"""

from __future__ import annotations

import functools
import importlib
import importlib.machinery
import importlib.util
import sys
from collections.abc import Mapping, Sequence
from importlib.abc import Loader, MetaPathFinder
from types import ModuleType
from typing import Any, Final


def names(home: str, words: str) -> dict[str, str]:
    return dict.fromkeys(words.split(), f"slime_compat.{home}")


REPLACED: Final[Mapping[str, Mapping[str, str]]] = {
    "slime.utils.types": names("old_sample", "Sample") | names("modalities", "MultimodalType MultimodalTypes"),
    "slime.utils.http_utils": names("requests", "post get") | names("engine_count", "get_rollout_num_engines"),
    "slime.utils.async_utils": names("rollout_call", "run"),
    "slime.rollout.sglang_rollout": names("requests", "get_model_url")
    | names("generate_state", "GenerateState")
    | names("written_before", "generate _prepare_prompt_ids")
    | names("rollout_call", "generate_and_rm_group"),
    "slime.rollout.filter_hub.base_types": names(
        "filter_output", "DynamicFilterOutput MetricGatherer call_dynamic_filter should_drop_dynamic_filter_output"
    ),
    "slime.rollout.base_types": names("rollout_output", "RolloutFnTrainOutput RolloutFnEvalOutput call_rollout_fn"),
    "slime.backends.megatron_utils.cp_utils": names("whole_samples", "all_gather_with_cp slice_log_prob_with_cp"),
    "slime.backends.megatron_utils.loss": names("old_loss", "get_log_probs_and_entropy"),
    "slime.observability.trace_utils": names("trace_spans", "trace_span trace_function build_sglang_meta_trace_attrs"),
}
"""Upstream module -> its names -> the module here that defines them."""

WITHOUT_UPSTREAM: Final[Mapping[str, Mapping[str, str]]] = {
    "slime.utils.misc": names("loading", "load_function SingletonMeta")
    | names("response_metadata", "decode_int32_meta_array"),
    "slime.utils.processing_utils": names("loading", "load_tokenizer load_processor encode_image_for_rollout_engine"),
    "slime.rollout.rm_hub": names("hub_rewards", "async_rm batched_async_rm"),
    "slime.rollout.rm_hub.math_dapo_utils": names("hub_rewards", "compute_score"),
    "slime.rollout.data_source": names("old_source", "DataSource pop_first"),
    "slime.rollout.filter_hub.dynamic_sampling_filters": names(
        "written_before", "check_reward_nonzero_std check_reward_nonzero_std_with_fallback"
    ),
}

PACKAGES: Final = frozenset(
    module[:end] for module in (*REPLACED, *WITHOUT_UPSTREAM) for end, letter in enumerate(module) if letter == "."
)


class StandIn(ModuleType):
    """A name that it lacks comes from upstream's own module, where that is installed; else ImportError, with what it has."""

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        module = f"{self.__name__}.{name}"
        if module in REPLACED or module in WITHOUT_UPSTREAM:
            return importlib.import_module(module)
        upstream = upstream_module(self.__name__)
        if upstream is not None and hasattr(upstream, name):
            return getattr(upstream, name)
        own = sorted(known for known in vars(self) if not known.startswith("__"))
        there = "" if upstream is None else f", and upstream's {upstream.__file__} has no such name"
        raise ImportError(
            f"{self.__name__}.{name} is not provided by slime-compat, which has {', '.join(own)}{there}. Call one of them, "
            "copy the function into your own module, or add a checkout of upstream slime to python_path",
            name=self.__name__,
        )


@functools.cache
def upstream_module(name: str) -> ModuleType | None:
    """Upstream's own module, beside its replacement; None: it is not installed."""
    package = sys.modules[name.rpartition(".")[0]]
    spec = importlib.machinery.PathFinder.find_spec(name, package.__path__)
    if spec is None or spec.loader is None:
        return None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class StandInLoader(Loader):
    def __init__(self, homes: Mapping[str, str]) -> None:
        self._homes = homes

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> ModuleType | None:
        return StandIn(spec.name) if self._homes else None

    def exec_module(self, module: ModuleType) -> None:
        for name, home in self._homes.items():
            setattr(module, name, getattr(importlib.import_module(home), name))


class StandIns(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname in REPLACED:
            return importlib.machinery.ModuleSpec(fullname, StandInLoader(REPLACED[fullname]))
        if not fullname.startswith("slime.") and fullname != "slime":
            return None
        if importlib.machinery.PathFinder.find_spec(fullname, path) is not None:
            return None
        if fullname in PACKAGES:
            return importlib.machinery.ModuleSpec(
                fullname, StandInLoader(WITHOUT_UPSTREAM.get(fullname, {})), is_package=True
            )
        if fullname in WITHOUT_UPSTREAM:
            return importlib.machinery.ModuleSpec(fullname, StandInLoader(WITHOUT_UPSTREAM[fullname]))
        # Without `name`: `from package import module` would take the error for a missing attribute, and hide the message.
        raise ModuleNotFoundError(
            f"{fullname} is a module of upstream slime, which is not installed; slime-compat only replaces "
            f"{', '.join(sorted({*REPLACED, *WITHOUT_UPSTREAM}))}. Add a checkout of upstream slime to python_path"
        )


def install() -> None:
    """Installs the import hook, once in a process. It stays, since functions may import these modules when called."""
    if not any(isinstance(finder, StandIns) for finder in sys.meta_path):
        sys.meta_path.insert(0, StandIns())
