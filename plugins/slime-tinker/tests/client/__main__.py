"""Runs a program of this folder, or a module with -m, as Python does, but without the interpreter's own end: the SDK's threads
abort that now and then (SIGABRT, one in twenty), when the program is through."""

import os
import runpy
import sys

if __name__ == "__main__":
    if sys.argv[1] == "-m":
        sys.argv = sys.argv[2:]
        runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv = sys.argv[1:]
        runpy.run_path(sys.argv[0], run_name="__main__")
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)
