"""Trackers, which write the metrics of a run."""
