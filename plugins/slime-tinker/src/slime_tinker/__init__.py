"""A server for programs that are written against the Tinker SDK."""
