"""Output that has lost its reader ends nothing; other errors are raised."""

import errno
import io
import os
import pty

import pytest

from slime_core.atomic_io.lasting_stream import LastingStream


@pytest.mark.parametrize("make", [os.pipe, pty.openpty], ids=["pipe", "terminal"])
def test_a_reader_that_is_gone(make):
    reader, writer = make()
    with os.fdopen(writer, "w", buffering=1) as stream:
        lasting = LastingStream(stream)
        assert lasting.write("read\n") == 5
        os.close(reader)
        for _ in range(3):
            assert lasting.write("not read\n") == 9
            lasting.flush()
        # Others of this process that write to the same file are safe too.
        os.write(writer, b"not read")
        assert lasting.fileno() == writer


def test_a_full_disk_is_still_an_error():
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(errno.ENOSPC, "full")

    with pytest.raises(OSError, match="full"):
        LastingStream(Full()).write("text")
