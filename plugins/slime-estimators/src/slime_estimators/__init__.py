"""Per-token KL estimators for slime."""

__version__ = "0.1.0"
