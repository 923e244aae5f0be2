"""Distillation for slime: a teacher's log-probs as the advantage (opd), and examples to imitate (sft)."""

__version__ = "0.1.0"
