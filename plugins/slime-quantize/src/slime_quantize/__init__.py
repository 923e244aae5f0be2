"""Quantized model folders for rollout engines."""
