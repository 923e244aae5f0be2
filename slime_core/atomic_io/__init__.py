"""Atomic writes, JSON text, and errors of full or unwritable disks."""
