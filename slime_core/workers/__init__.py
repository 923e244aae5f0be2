"""The thin objects that hold a backend or an engine where it runs: check the fingerprint, forward calls."""
