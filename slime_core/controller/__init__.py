"""A run from start to end: the loop, its session, the learner, checkpoints, and the files of a run."""
