"""REINFORCE++ and RLOO for slime: recipes, and the advantage estimators that they name."""

__version__ = "0.1.0"
