"""What a run is told: the run file, flags, and the binding of plugin options. Everything is frozen once bound."""
