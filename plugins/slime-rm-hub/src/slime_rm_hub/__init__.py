"""Rewards: text answers, choices, instructions, services, served reward models."""
