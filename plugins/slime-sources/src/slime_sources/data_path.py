"""DataPath: a data file as it is named in the config, with the range of rows that is wanted of it."""

from __future__ import annotations

import re
from dataclasses import dataclass

from slime_core.errors import DataError

_RANGE = re.compile(r"(?P<path>.*)@\[(?P<range>[^\[\]]*)\]", re.DOTALL)


@dataclass(frozen=True, slots=True)
class DataPath:
    """`path`, or `path@[start:stop]`: both ends optional, negative ones count from the end, as in Python."""

    path: str
    start: int | None = None
    stop: int | None = None

    @classmethod
    def parse(cls, text: str) -> DataPath:
        """DataError says what is wrong with the range.

        >>> DataPath.parse("train.jsonl@[10:-1]")
        DataPath(path='train.jsonl', start=10, stop=-1)
        """
        found = _RANGE.fullmatch(text)
        path = found["path"] if found else text
        if not path:
            raise DataError(f'prompt_data "{text}": there is no file name; write path.jsonl or path.jsonl@[a:b]')
        if not found:
            return cls(path)
        ends = found["range"].split(":")
        if len(ends) == 1:
            raise DataError(f'prompt_data "{text}": a range of rows is two ends with a colon, for example @[0:100]')
        if len(ends) > 2:
            raise DataError(f'prompt_data "{text}": a range of rows has no step; write @[a:b]')
        start, stop = (cls._end(end, text) for end in ends)
        return cls(path, start, stop)

    @staticmethod
    def _end(end: str, text: str) -> int | None:
        try:
            return int(end) if end.strip() else None
        except ValueError as error:
            raise DataError(
                f'prompt_data "{text}": "{end}" is not a row number; the ends of a range are whole numbers or left out'
            ) from error

    def rows(self, num_rows: int) -> range:
        """Row numbers that it names in a file of `num_rows`; ends beyond the file are cut, as in Python."""
        return range(*slice(self.start, self.stop).indices(num_rows))

    def __str__(self) -> str:
        if self.start is None and self.stop is None:
            return self.path
        start, stop = ("" if end is None else end for end in (self.start, self.stop))
        return f"{self.path}@[{start}:{stop}]"
