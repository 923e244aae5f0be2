"""Training scripts of TRL to run files."""
