"""Bridges: the form of a model family in Megatron, and where each of its weights is in a Hugging Face folder."""
