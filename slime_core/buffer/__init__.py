"""Prompts on their way to the rollouts: data files, rendering, what waits to go again, and groups as tables."""
