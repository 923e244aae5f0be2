"""The examples of slime-agents: what the model earns by its tool, its colleague, its agent; and nothing without them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from conftest import RunExample


def test_retool(run_example: RunExample) -> None:
    ran = run_example("retool", "--num-rollout", "6")
    assert ran.after["held_out"] > ran.before["held_out"] + 0.08
    assert ran.after["without_tool"] < 0.05
    assert ran.metrics("rollout/step")[-1]["rollout/count/tool_calls"] > 0.9


def test_multi_agent(run_example: RunExample) -> None:
    ran = run_example("multi_agent", "--num-rollout", "20", "--eval-interval", "20")
    assert ran.after["held_out"] > ran.before["held_out"] + 0.08
    assert ran.after["without_note"] < 0.2


def test_openai_agent(run_example: RunExample) -> None:
    ran = run_example("openai_agent", "--num-rollout", "12", "--eval-interval", "12")
    rewards = [step["rollout/raw_reward"] for step in ran.metrics("rollout/step")]
    assert sum(rewards[-3:]) / 3 > sum(rewards[:2]) / 2 + 0.1
    assert ran.after["held_out"] > 0.6
    assert ran.after["without_tool"] < 0.05
