"""KL estimators and off-policy corrections for slime."""

__version__ = "0.1.0"
