"""Options of ServerArgs that have different names in different versions of SGLang. A run file may have any of them.

Read from SGLang 0.5.15, 0.5.16 and 0.5.20: up to 0.5.16 its command line takes the old names too, with a warning.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Final


@dataclass(frozen=True, slots=True)
class Renamed:
    old: str
    new: str
    values: Mapping[Any, Any] = field(default_factory=dict)
    """Old values to new ones, where they differ."""

    def to_new(self, value: Any) -> Any:
        return self.values.get(value, value) if isinstance(value, str | bool) else value

    def to_old(self, value: Any) -> Any:
        return next((old for old, new in self.values.items() if new == value), value)


CONTEXT_PARALLEL: Final = {
    "in-seq-split": "zigzag",
    "round-robin-split": "interleave",
}
RENAMED: Final = (
    Renamed("cuda_graph_bs", "cuda_graph_bs_decode"),
    Renamed("cuda_graph_max_bs", "cuda_graph_max_bs_decode"),
    Renamed("piecewise_cuda_graph_tokens", "cuda_graph_bs_prefill"),
    Renamed("piecewise_cuda_graph_max_tokens", "cuda_graph_max_bs_prefill"),
    Renamed("piecewise_cuda_graph_compiler", "cuda_graph_tc_compiler"),
    Renamed("disable_piecewise_cuda_graph", "cuda_graph_backend_prefill", {True: "disabled"}),
    Renamed("enable_breakable_cuda_graph", "cuda_graph_backend_prefill", {True: "breakable"}),
    Renamed("enforce_piecewise_cuda_graph", "cuda_graph_backend_prefill", {True: "tc_piecewise"}),
    Renamed("nsa_decode_backend", "dsa_decode_backend"),
    Renamed("nsa_prefill_backend", "dsa_prefill_backend"),
    Renamed("enable_nsa_prefill_context_parallel", "enable_prefill_cp"),
    Renamed("enable_dsa_prefill_context_parallel", "enable_prefill_cp"),
    Renamed("enable_prefill_context_parallel", "enable_prefill_cp"),
    Renamed("nsa_prefill_cp_mode", "cp_strategy", CONTEXT_PARALLEL),
    Renamed("dsa_prefill_cp_mode", "cp_strategy", CONTEXT_PARALLEL),
    Renamed("prefill_cp_mode", "cp_strategy", CONTEXT_PARALLEL),
    Renamed("mamba_scheduler_strategy", "mamba_radix_cache_strategy"),
    Renamed("speculative_dflash_draft_window_size", "speculative_draft_window_size"),
    Renamed("enable_deepep_waterfill", "enable_waterfill"),
    Renamed("enable_gdn_replayssm_spec", "enable_linear_replayssm_spec"),
)


@dataclass(frozen=True, slots=True)
class OtherName:
    """A name that the installed SGLang does not have, and the one that it has instead."""

    name: str
    row: Renamed
    is_old: bool

    @property
    def current(self) -> str:
        return self.row.new if self.is_old else self.row.old

    def value(self, given: Any) -> Any:
        return self.row.to_new(given) if self.is_old else self.row.to_old(given)

    @property
    def is_switch(self) -> bool:
        """Whether it is a switch, though the installed option takes a value."""
        return self.is_old and True in self.row.values

    def type(self, installed: Any) -> Any:
        """Its type. `installed`: that of the installed option."""
        if True not in self.row.values:
            return installed
        return bool if self.is_old else str


def other_names(installed: Collection[str]) -> Iterator[OtherName]:
    """The names of other versions, for the installed options. Of several, the first row counts."""
    seen = set(installed)
    for row in RENAMED:
        for name, current, is_old in ((row.old, row.new, True), (row.new, row.old, False)):
            if name not in seen and current in installed:
                seen.add(name)
                yield OtherName(name, row, is_old)
