"""The run file: tables, flags, binding of plugin options, cross-checks."""
