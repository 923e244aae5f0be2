"""The data buffer over HTTP: agents outside the run fetch prompts and return trajectories."""
