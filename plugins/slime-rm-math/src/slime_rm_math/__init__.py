"""Rewards for mathematics: whether a response ends in the answer that its prompt's label asks for."""
