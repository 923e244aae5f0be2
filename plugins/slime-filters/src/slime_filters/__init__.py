"""Filters over finished groups and over the data buffer."""
