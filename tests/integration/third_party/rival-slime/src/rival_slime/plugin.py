"""Needs what is not installed."""

import a_module_that_nobody_has

acme = a_module_that_nobody_has.reward
