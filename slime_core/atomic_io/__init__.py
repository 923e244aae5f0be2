"""Atomic writes, JSON text, output that may lose its reader, and errors of full or unwritable disks."""
