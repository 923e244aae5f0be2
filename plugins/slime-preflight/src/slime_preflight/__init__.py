"""Checks before a slime run starts: what it would hold in memory, and whether this machine can run it."""
