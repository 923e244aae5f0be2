"""A run from start to end: the loop, its session, the learner, checkpoints, and what a run writes down."""
