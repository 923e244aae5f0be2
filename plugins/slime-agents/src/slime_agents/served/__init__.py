"""Agents that know nothing of training: they get an address that speaks as OpenAI or Anthropic do, and their calls become
samples."""
