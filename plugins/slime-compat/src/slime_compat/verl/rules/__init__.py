"""Keys of verl to tables of a run file: a rule for each part of it."""
