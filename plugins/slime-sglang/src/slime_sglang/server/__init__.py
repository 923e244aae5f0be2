"""What runs in the server's processes, and nowhere else."""
