"""Upstream's functions that load something: a function by its path, a tokenizer, an image for a request."""

from __future__ import annotations

import base64
import importlib
import io
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from PIL.Image import Image


@cache
def load_function(path: str) -> Any:
    """The attribute at a dotted path. ImportError or AttributeError names the missing part."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


class SingletonMeta(type):
    """Every call of the class returns the object of the first one."""

    _instances: dict[type, Any] = {}

    def __call__(cls, *args: Any, **options: Any) -> Any:
        if cls not in cls._instances:
            cls._instances[cls] = super().__call__(*args, **options)
        return cls._instances[cls]

    def clear_instances(cls) -> None:
        cls._instances.pop(cls, None)


def load_tokenizer(name_or_path: str, **options: Any) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(name_or_path, **options)


def load_processor(name_or_path: str, **options: Any) -> Any:
    """None: the folder has no processor."""
    from transformers import AutoProcessor, ProcessorMixin

    try:
        found = AutoProcessor.from_pretrained(name_or_path, **options)
    except (OSError, ValueError):
        return None
    return found if isinstance(found, ProcessorMixin) else None


def encode_image_for_rollout_engine(image: Image) -> str:
    """A data URL of the image as PNG."""
    content = io.BytesIO()
    image.convert("RGB").save(content, format="PNG")
    return f"data:image/png;base64,{base64.b64encode(content.getvalue()).decode('ascii')}"
