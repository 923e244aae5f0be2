"""What a run would do, told before anything is started: processes and devices, a step, bytes by phase, and whether they fit."""
