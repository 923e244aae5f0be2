"""slime-fsdp: torch FSDP2 over transformers models."""
