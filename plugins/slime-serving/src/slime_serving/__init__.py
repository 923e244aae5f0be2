"""Code that HTTP servers of slime's plugins share: listener, bearer token, command, process groups."""
