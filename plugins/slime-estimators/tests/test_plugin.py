"""The entry points resolve, options are strict, and listing them imports nothing heavy."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import entry_points

import pytest
from pydantic import ValidationError

from slime_core import API_VERSION
from slime_core.contracts.correction import CorrectionDriver, OffPolicyCorrection
from slime_core.contracts.kl import KlDriver, KlEstimator
from slime_core.contracts.needs import Need

ESTIMATORS = {"k1", "k2", "k3", "low_var_kl"}
CORRECTIONS = {"tis", "icepop", "mis", "opsm"}


def registered(group):
    return {e.name: e.load() for e in entry_points(group=group) if e.dist.name == "slime-estimators"}


def test_every_estimator_is_registered_and_builds():
    found = registered("slime.kl")
    assert set(found) == ESTIMATORS
    for driver in found.values():
        assert issubclass(driver, KlDriver)
        assert driver.api_version == API_VERSION
        assert driver.__doc__
        assert isinstance(driver.build(driver.Config()), KlEstimator)
        with pytest.raises(ValidationError, match="extra"):
            driver.Config(strength=1)


def test_every_correction_is_registered_and_builds():
    found = registered("slime.corrections")
    assert set(found) == CORRECTIONS
    for driver in found.values():
        config = driver.Config()
        assert issubclass(driver, CorrectionDriver)
        assert driver.api_version == API_VERSION
        assert driver.__doc__
        assert isinstance(driver.build(config), OffPolicyCorrection)
        assert driver.Config.model_validate_json(config.model_dump_json()) == config
        assert all(field.description for field in driver.Config.model_fields.values())
        with pytest.raises(ValidationError, match="extra"):
            driver.Config(strength=1)


def test_which_corrections_read_the_engines_log_probs():
    readers = {
        name for name, driver in registered("slime.corrections").items() if Need.ROLLOUT_LOGPROBS in driver.needs
    }
    assert readers == CORRECTIONS - {"opsm"}


def test_defaults_are_those_of_the_sources(correction):
    tis, icepop, mis = (correction(name).Config() for name in ("tis", "icepop", "mis"))
    assert (tis.tis_clip_low, tis.tis_clip) == (0.0, 2.0)
    assert (icepop.tis_clip_low, icepop.tis_clip) == (0.5, 5.0)
    assert (mis.tis_level, mis.tis_mode, mis.tis_bounds) == ("token", "truncate", (0.5, 2.0))
    assert (mis.use_rs, mis.rs_bounds, mis.rs_veto_threshold) == (False, (0.5, 2.0), 1e-4)
    assert correction("opsm").Config().opsm_delta == 1e-4


def test_a_lower_bound_that_is_not_given_is_the_inverse_of_the_upper_one(correction):
    config = correction("mis").Config
    assert config(tis_upper_bound=4.0).tis_bounds == (0.25, 4.0)
    assert config(tis_upper_bound=4.0).rs_bounds == (0.25, 4.0)
    assert config(tis_upper_bound=4.0, rs_upper_bound=3.0).rs_bounds == (0.25, 3.0)
    assert config(tis_lower_bound=0.1, rs_upper_bound=3.0).rs_bounds == (0.1, 3.0)
    assert config(rs_lower_bound=0.9, rs_upper_bound=1.1).tis_bounds == (0.5, 2.0)


@pytest.mark.parametrize(
    ("name", "options", "error"),
    [
        ("tis", {"tis_clip": 0.0}, "tis_clip"),
        ("tis", {"tis_clip": float("inf")}, "tis_clip"),
        ("tis", {"tis_clip": 1.0, "tis_clip_low": 1.0}, "tis_clip_low = 1 must be below tis_clip = 1"),
        ("icepop", {"tis_clip": 0.4}, "tis_clip_low = 0.5 must be below tis_clip = 0.4"),
        ("mis", {"tis_upper_bound": 0.5}, "tis_lower_bound = 2 must be below tis_upper_bound = 0.5"),
        ("mis", {"rs_lower_bound": 3.0}, "rs_lower_bound = 3 must be below rs_upper_bound = 2"),
        ("mis", {"tis_level": "word"}, "'token', 'sequence' or 'geometric'"),
        ("mis", {"tis_mode": "truncated"}, "'truncate', 'clip' or 'mask'"),
        ("mis", {"rs_veto_threshold": 1.0}, "rs_veto_threshold"),
        ("mis", {"use_tis": False, "rs_veto_threshold": 0.0}, "nothing would be corrected"),
        ("opsm", {"opsm_delta": -0.1}, "opsm_delta"),
    ],
)
def test_impossible_options_are_refused(correction, name, options, error):
    with pytest.raises(ValidationError, match=error):
        correction(name).Config(**options)


def test_a_threshold_as_text_is_a_number(correction):
    assert correction("mis").Config(rs_veto_threshold="1e-4").rs_veto_threshold == 1e-4


def test_the_plugin_module_imports_nothing_heavy():
    code = "import sys, slime_estimators.plugin; print([m for m in ('torch', 'numpy', 'ray') if m in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"
