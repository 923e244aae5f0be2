"""Makes vLLM's libraries small for a machine with Hopper GPUs: python hopper_only.py FILE...

nvcc puts code for every GPU into a section of a library, as containers of a header and entries (cubins, PTX). Of each
container the cubins of sm_90 stay; its PTX stays where there is no such cubin, for the driver to compile. The rest becomes
zeros, in place, which a compressor removes: sizes and addresses stay.
"""

from __future__ import annotations

import mmap
import struct
import subprocess
import sys
from collections import Counter
from pathlib import Path

SECTION = ".nv_fatbin"
MAGIC = 0xBA55ED50
PTX, CUBIN = 1, 2
HOPPER = 90


def section_of(path: Path) -> tuple[int, int] | None:
    """First byte and one past the last of the section in the file."""
    table = subprocess.run(["readelf", "-SW", path], capture_output=True, text=True, check=True).stdout
    for line in table.splitlines():
        words = line.replace("[ ", "[").split()
        if words[1:2] == [SECTION]:
            start, size = int(words[4], 16), int(words[5], 16)
            return start, start + size
    return None


def entries_of(data: mmap.mmap, place: int, end: int) -> list[tuple[int, int, int, int]]:
    """(kind, architecture, first byte, size) of each entry of a container."""
    entries = []
    while place < end:
        kind, _, header, size = struct.unpack_from("<HHIQ", data, place)
        (architecture,) = struct.unpack_from("<I", data, place + 28)
        if not header:
            raise ValueError(f"an entry at byte {place} without a header")
        entries.append((kind, architecture, place + header, size))
        place += header + size
    return entries


def clear(path: Path) -> dict[str, Counter[str]]:
    """Bytes that were kept and cleared, by kind and architecture."""
    counts: dict[str, Counter[str]] = {"kept": Counter(), "cleared": Counter()}
    section = section_of(path)
    if section is None:
        return counts
    with path.open("r+b") as file, mmap.mmap(file.fileno(), 0) as data:
        place, end = section
        while place < end:
            magic, _, header, size = struct.unpack_from("<IHHQ", data, place)
            if magic != MAGIC:
                place += 8
                continue
            entries = entries_of(data, place + header, place + header + size)
            native = any(kind == CUBIN and architecture == HOPPER for kind, architecture, *_ in entries)
            for kind, architecture, start, length in entries:
                keeps = architecture == HOPPER if kind == CUBIN else not native and architecture <= HOPPER
                name = f"{'ptx' if kind == PTX else 'sm'}_{architecture}"
                counts["kept" if keeps else "cleared"][name] += length
                if not keeps:
                    data[start : start + length] = bytes(length)
            place += header + size
    return counts


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(name, *(f"{what}: {dict(sizes)}" for what, sizes in clear(Path(name)).items()))
