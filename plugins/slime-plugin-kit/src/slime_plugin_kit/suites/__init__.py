"""One module of tests for each kind of plugin, each test named after the property that it proves."""
