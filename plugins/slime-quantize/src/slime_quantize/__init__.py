"""Quantised model folders for rollout engines."""
