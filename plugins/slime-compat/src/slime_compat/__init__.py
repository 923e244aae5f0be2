"""Launch scripts and functions that were written for THUDM's slime, in runs of this one."""
