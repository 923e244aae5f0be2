"""What training backends share: torch over packed sequences, and what stands beside it."""
