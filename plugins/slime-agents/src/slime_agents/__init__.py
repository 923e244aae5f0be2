"""Agents for slime: a sandboxed interpreter, tool use, agents that answer each other, agents behind an HTTP address."""
