"""Agents for slime: tool use in a sandboxed interpreter, several agents in one episode, agents that call an HTTP API."""
