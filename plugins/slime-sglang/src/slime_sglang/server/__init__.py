"""Code that runs only in the server's processes."""
