"""Trackers: where the metrics of a run are written."""
