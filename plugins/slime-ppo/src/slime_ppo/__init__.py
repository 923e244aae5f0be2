"""PPO for slime: the recipe, generalised advantage estimation, and the critic's loss."""

__version__ = "0.1.0"
