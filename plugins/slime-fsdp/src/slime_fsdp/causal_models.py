"""Model types for which transformers has a causal language model, read from its source. Importing its table imports torch and
its compiler, which takes seconds, and every command that reads a run file needs the table."""

from __future__ import annotations

import ast
from importlib.util import find_spec
from pathlib import Path
from typing import Final

TABLE: Final = "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"
SOURCE: Final = Path("models") / "auto" / "modeling_auto.py"


def causal_model_types() -> frozenset[str]:
    """The model types, by their names in config.json."""
    spec = find_spec("transformers")
    folders = () if spec is None else spec.submodule_search_locations or ()
    for path in (Path(folder) / SOURCE for folder in folders):
        if path.is_file() and (found := types_in(path.read_text(encoding="utf-8"))):
            return found
    # Installed without source, or with another syntax.
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    return frozenset(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)


def types_in(source: str) -> frozenset[str]:
    """The keys of the table, which has the form `OrderedDict([(KEY, VALUE), ...])`; empty if it has another form."""
    for statement in ast.parse(source).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=ast.Call(args=[ast.List(elts=entries)])) if (
                name == TABLE
            ):
                keys = [entry.elts[0] for entry in entries if isinstance(entry, ast.Tuple) and len(entry.elts) == 2]
                named = [key.value for key in keys if isinstance(key, ast.Constant) and isinstance(key.value, str)]
                return frozenset(named) if len(named) == len(entries) else frozenset()
    return frozenset()
