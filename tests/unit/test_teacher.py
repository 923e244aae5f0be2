"""Recipes without rewards, without advantages or with a teacher: what binding makes of them, and every complaint."""

import json
import re
from pathlib import Path

import pytest

from slime_core.config.roles import COPY_KEYS
from slime_core.contracts.backend import REFERENCE, TEACHER
from slime_core.contracts.needs import Need
from slime_core.errors import ConfigError, ModelError
from slime_core.learner import LearnerPlan
from slime_core.manifest import resolved_config
from slime_core.materials import check_copy
from slime_core.new_model import ModelSizes, new_model

PLUGINS = """
from slime_core.contracts.advantage import AdvantageDriver
from slime_core.contracts.algorithm import Recipe
from slime_core.contracts.collector import CollectorDriver
from slime_core.contracts.driver import DriverConfig
from slime_core.contracts.loss import LossDriver
from slime_core.contracts.needs import Need
from slime_core.plugin import driver, register


class TaughtConfig(DriverConfig):
    weight: float = 1.0
    \"\"\"Of the teacher.\"\"\"


@driver("slime.advantages", "taught")
class Taught(AdvantageDriver):
    Config = TaughtConfig
    needs = frozenset({Need.TEACHER_LOGPROBS, Need.OLD_LOGPROBS})
    uses_rewards = False

    @classmethod
    def build(cls, config):
        return f"taught {config.weight}"


@driver("slime.losses", "copies")
class Copies(LossDriver):
    needs = frozenset()
    uses_advantages = False

    @classmethod
    def build(cls, config):
        return None


@driver("slime.collectors", "rows")
class Rows(CollectorDriver):
    @classmethod
    def build(cls, config):
        return None

    @classmethod
    def problems(cls, config, rollout):
        return ["rows: too many"] if rollout.n_samples_per_prompt > 4 else []
"""
