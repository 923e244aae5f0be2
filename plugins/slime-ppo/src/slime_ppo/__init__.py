"""PPO for slime: the recipe, generalized advantage estimation, and the critic's loss."""

__version__ = "0.1.0"
