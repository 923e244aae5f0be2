"""The data buffer over HTTP: agents outside the run take prompts and push trajectories."""
