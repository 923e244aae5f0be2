"""Rewards for mathematics: whether the final answer of a response equals the label of its prompt."""
