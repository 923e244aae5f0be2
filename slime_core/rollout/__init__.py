"""Prompts to accepted groups: concurrency, filters, retries, rewards."""
