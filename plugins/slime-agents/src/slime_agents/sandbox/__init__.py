"""A Python interpreter for code that nobody has read."""

from slime_agents.sandbox.execution import Execution, Outcome
from slime_agents.sandbox.interpreter import Interpreter
from slime_agents.sandbox.terms import SandboxConfig

__all__ = ["Execution", "Interpreter", "Outcome", "SandboxConfig"]
