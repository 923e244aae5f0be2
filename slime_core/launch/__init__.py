"""Where the roles run: in this process, or as Ray actors. The rest of the kernel cannot tell the difference."""
