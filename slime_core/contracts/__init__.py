"""One module per extension point: the base class, its driver, and what they exchange; and the hook specs."""
