"""One module per extension point: the protocol or base class, and its driver with a Config; nothing else."""
