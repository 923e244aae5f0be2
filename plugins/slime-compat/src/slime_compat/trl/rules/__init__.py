"""Keywords of TRL to tables of a run file: a rule for each part of it."""
