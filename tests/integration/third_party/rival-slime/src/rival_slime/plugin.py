"""Needs what is not installed."""

import a_module_that_is_missing

acme = a_module_that_is_missing.reward
