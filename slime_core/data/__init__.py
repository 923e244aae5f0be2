"""Prompts and groups at rest: rendering, the data buffer, Parquet, and Hugging Face model folders."""
