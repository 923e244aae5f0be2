"""Reads the rollouts of slime runs in a terminal."""
