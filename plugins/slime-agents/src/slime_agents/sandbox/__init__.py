"""A Python interpreter for untrusted code."""

from slime_agents.config import SandboxConfig
from slime_agents.sandbox.execution import Execution, Outcome
from slime_agents.sandbox.interpreter import Interpreter

__all__ = ["Execution", "Interpreter", "Outcome", "SandboxConfig"]
