"""The `slime` command: its frame, and the commands of the kernel."""
