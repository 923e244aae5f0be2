"""slime's kernel: contracts, registries, hooks, the data path and the loop. It knows no plugin by name."""

__version__ = "0.2.0"

API_VERSION = 2
"""The version of the contracts in `slime_core.contracts`; every driver states the one it was written for."""
