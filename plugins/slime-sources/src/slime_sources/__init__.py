"""Dynamic data sources: streams, prompts that a function makes, a curriculum."""
