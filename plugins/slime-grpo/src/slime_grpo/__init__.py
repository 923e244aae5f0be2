"""GRPO and its nearest relatives for slime: recipes, and the parts that they name."""

__version__ = "0.1.0"
