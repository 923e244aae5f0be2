"""One module per extension point: the base class, its driver, the types they exchange; and the hooks."""
