"""Optimizers for large models: Muon, and AdamW with moments of 8 bits."""
