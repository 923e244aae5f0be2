"""Training backend for slime: Megatron-core over Hugging Face folders."""
