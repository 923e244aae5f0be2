"""Launcher for slime: trainers and engines as Ray actors, on one machine or many."""
