"""SGLang as slime's rollout engine."""
