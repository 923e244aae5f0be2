"""Configurations of verl to run files."""
