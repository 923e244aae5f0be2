"""A stranger's middleware."""
