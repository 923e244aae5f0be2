"""Loads weights from slime's folders: verifies every bucket before loading any, and applies deltas."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from slime_transports.delta_code import Planes
    from slime_transports.folder import FileEntry, Manifest

CAN_VERIFY: Final = "slime_loading"
"""Action of /weights_checker that succeeds only if these functions are hooked in."""
BASE: Final = "slime_weights_identity"
"""Attribute of the model: identity of the weights that it holds."""


def load_from_disk(
    original: Callable[..., Any], updater: Any, model_path: str, load_format: str, *args: Any, **kwargs: Any
) -> tuple[bool, str]:
    """Wraps `update_weights_from_disk`. Returns whether all ranks have loaded the folder, and a message."""
    loaded, message, identity = load_here(original, updater, model_path, load_format, *args, **kwargs)
    if kwargs.get("weight_name_filter") is None:
        # With a filter, SGLang itself reloads lost experts, and not on all ranks.
        loaded, message = agreed(loaded, message)
    if loaded:
        setattr(updater.get_model(), BASE, identity)
    return loaded, message


def agreed(loaded: bool, message: str) -> tuple[bool, str]:
    """The common result of all ranks of this pipeline stage: SGLang returns only the first rank's result.

    Raises RuntimeError, which ends the server, if a later stage has not loaded the weights: SGLang does not report that, and
    the version would look complete."""
    import torch.distributed as dist

    if not dist.is_initialized():
        return loaded, message
    from sglang.srt.distributed import get_pp_group, get_tp_group

    group, stage = get_tp_group().cpu_group, get_pp_group().rank_in_group
    given: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(given, (loaded, message), group=group)
    refusals = [text for done, text in given if not done]
    if not refusals:
        return True, message
    described = "; ".join(dict.fromkeys(refusals))
    if stage:
        raise RuntimeError(f"pipeline stage {stage} has not loaded the weights: {described}")
    return False, described


def load_here(
    original: Callable[..., Any], updater: Any, model_path: str, load_format: str, *args: Any, **kwargs: Any
) -> tuple[bool, str, str | None]:
    """Loads on this rank. Returns whether it succeeded, a message, and the identity of the weights that it holds then."""
    from slime_transports.folder import MANIFEST, READERS, WRONG_BASE, DamagedWeights, read_manifest, verify_whole

    model = updater.get_model()
    folder = Path(model_path)
    if not (folder / MANIFEST).is_file():
        setattr(model, BASE, None)
        loaded, message = original(updater, model_path, load_format, *args, **kwargs)
        return loaded, message, None
    try:
        manifest = read_manifest(folder)
        if manifest.base is not None and getattr(model, BASE, None) != manifest.base:
            return False, f"version {manifest.version} is {WRONG_BASE}", None
        if manifest.base is None:
            verify_whole(folder, manifest)
            setattr(model, BASE, None)
            loaded, message = original(updater, model_path, load_format, *args, **kwargs)
        else:
            with ThreadPoolExecutor(READERS) as readers:
                changes = list(readers.map(partial(checked, folder, manifest), range(len(manifest.buckets))))
            setattr(model, BASE, None)
            apply(model, manifest.buckets, changes)
            loaded, message = True, f"Applied the delta to version {manifest.version}."
    except (DamagedWeights, OSError, ValueError, KeyError) as error:
        return False, f"{type(error).__name__}: {error}", None
    return loaded, message, manifest.identity


def forget_base(original: Callable[..., Any], updater: Any, *args: Any, **kwargs: Any) -> Any:
    """Wraps the other functions that load weights: after them, no delta can be applied."""
    setattr(updater.get_model(), BASE, None)
    return original(updater, *args, **kwargs)


def checked(folder: Path, manifest: Manifest, number: int) -> Planes:
    """The changes of a bucket. Raises DamagedWeights or ValueError if its file is not what was written."""
    import xxhash

    from slime_transports.delta_code import decompress
    from slime_transports.folder import DamagedWeights

    entry = manifest.buckets[number]
    content = (folder / entry.file).read_bytes()
    found = xxhash.xxh3_64_hexdigest(content)
    if found != entry.checksum:
        raise DamagedWeights(
            f"bucket {number} of version {manifest.version} ({folder / entry.file}) is damaged: checksum "
            f"{entry.checksum} was written, its bytes have {found}"
        )
    return decompress(content, entry.parts)


def apply(model: Any, entries: Sequence[FileEntry], changes: Sequence[Planes]) -> None:
    """Applies deltas with the model's own loader, which handles fused, split and sharded tensors. It gets whole tensors
    that are NaN where nothing has changed; there the parameters get their old values back.

    Raises ValueError for quantized parameters, and if a NaN is left.
    """
    import torch

    parameters = dict(model.named_parameters())
    narrow = [name for name, parameter in parameters.items() if parameter.dtype.itemsize < 2]
    if narrow:
        raise ValueError(f"deltas cannot be applied to quantized weights such as {narrow[0]}")
    device = next(iter(parameters.values())).device
    with torch.no_grad():
        for entry, planes in zip(entries, changes, strict=True):
            tensors = with_partners(entry, list(changed_tensors(entry, planes, device)))
            for layer, named in groupby(tensors, key=lambda item: layer_of(item[0])):
                own = {name: p for name, p in parameters.items() if name.startswith(layer)} or parameters
                before = {name: parameter.clone() for name, parameter in own.items()}
                model.load_weights(list(named))
                for name, parameter in own.items():
                    parameter.copy_(torch.where(parameter.isnan(), before[name], parameter))
        if any(getattr(module, "w_kc", None) is not None for module in model.modules()):
            # Latent attention copied these parameters when they had NaNs.
            model.post_load_weights()
        for name, parameter in parameters.items():
            if parameter.isnan().any():
                raise ValueError(f"the delta could not be applied to {name}")


def changed_tensors(entry: FileEntry, planes: Planes, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yields (name, tensor) of tensors with a changed element; unchanged elements are NaN."""
    import torch

    from slime_transports.delta_code import BITS, changed

    dtypes = [getattr(torch, dtype) for dtype in entry.dtypes]
    ends: list[int] = []
    for dtype, shape in zip(dtypes, entry.shapes, strict=True):
        ends.append((ends[-1] if ends else 0) + dtype.itemsize * torch.Size(shape).numel())
    starts = [0, *ends[:-1]]
    for width, start, end, positions, values in changed(planes, dtypes, ends, device):
        for name, dtype, shape, first, last in zip(entry.names, dtypes, entry.shapes, starts, ends, strict=True):
            if dtype.itemsize != width or first == last or not start <= first < end:
                continue
            low, high = torch.searchsorted(
                positions, torch.tensor([(first - start) // width, (last - start) // width], device=device)
            ).tolist()
            if low == high:
                continue
            if not dtype.is_floating_point:
                raise ValueError(f"{name} of {dtype} has changed: only floating-point weights can have deltas")
            tensor = torch.full(shape, torch.nan, dtype=dtype, device=device)
            tensor.view(-1).view(BITS[width])[positions[low:high] - (first - start) // width] = values[low:high]
            yield name, tensor


def with_partners(entry: FileEntry, tensors: Sequence[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """The changed tensors, and those that the model loads only together with them."""
    import torch

    from slime_transports.flattened_bucket import partner_of

    shapes = dict(zip(entry.names, entry.shapes, strict=True))
    found: list[tuple[str, Tensor]] = []
    there = {name for name, _ in tensors}
    for name, tensor in tensors:
        found.append((name, tensor))
        partner = partner_of(name)
        if partner in shapes and partner not in there:
            found.append((partner, torch.full(shapes[partner], torch.nan, dtype=tensor.dtype, device=tensor.device)))
    return found


def layer_of(name: str) -> str:
    """The prefix of a name's layer, such as `model.layers.3.`; outside of layers, the path of its module."""
    parts = name.split(".")
    number = next((place for place, part in enumerate(parts) if part.isdecimal()), len(parts) - 2)
    return "".join(f"{part}." for part in parts[: number + 1])
