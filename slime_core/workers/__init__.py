"""Launchers, training and engine workers, and the colocation of both on shared devices."""
