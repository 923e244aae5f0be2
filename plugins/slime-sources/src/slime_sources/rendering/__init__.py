"""Rendering of rows: chat template, tokens, limits of a prompt."""
