"""What runs in vLLM's interpreter, which need not have slime. It imports vLLM, torch and the standard library only."""
