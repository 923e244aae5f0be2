"""Rollout workers: processes that generate and score groups, each a share of them. The driver keeps the order of events."""
