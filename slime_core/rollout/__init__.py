"""Prompts to accepted groups: the engine client, episodes, rewards, filters and collectors."""
