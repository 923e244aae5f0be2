"""DataPath: a data file as the config names it, with the range of rows to use."""

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
        """Parses an entry of prompt_data. DataError if its range is invalid.

        >>> DataPath.parse("train.jsonl@[10:-1]")
        DataPath(path='train.jsonl', start=10, stop=-1)
        """
        found = _RANGE.fullmatch(text)
        path = found["path"] if found else text
        if not path:
            raise DataError(f'prompt_data = "{text}": no file name. Set path.jsonl or path.jsonl@[a:b]')
        if not found:
            return cls(path)
        ends = found["range"].split(":")
        if len(ends) == 1:
            raise DataError(f'prompt_data = "{text}": a range of rows has two ends with a colon, for example @[0:100]')
        if len(ends) > 2:
            raise DataError(f'prompt_data = "{text}": a range of rows has no step. Write @[a:b]')
        start, stop = (cls._end(end, text) for end in ends)
        return cls(path, start, stop)

    @staticmethod
    def _end(end: str, text: str) -> int | None:
        try:
            return int(end) if end.strip() else None
        except ValueError as error:
            raise DataError(
                f'prompt_data = "{text}": "{end}" is not a row number. The ends of a range must be whole numbers, or empty'
            ) from error

    def rows(self, num_rows: int) -> range:
        """The row numbers of the range in a file of `num_rows` rows; ends beyond the file are cut, as in Python."""
        return range(*slice(self.start, self.stop).indices(num_rows))

    def __str__(self) -> str:
        if self.start is None and self.stop is None:
            return self.path
        start, stop = ("" if end is None else end for end in (self.start, self.stop))
        return f"{self.path}@[{start}:{stop}]"
