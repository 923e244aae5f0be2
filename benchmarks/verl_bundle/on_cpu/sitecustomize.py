"""Stubs of the compiled packages that SGLang imports and never calls on a CPU, in processes with this folder on their path."""

from slime_sglang.server.stubs import install_stubs

install_stubs()
