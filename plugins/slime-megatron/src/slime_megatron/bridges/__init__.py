"""Bridges: what a model family looks like in Megatron, and where each of its weights lies in a Hugging Face folder."""
