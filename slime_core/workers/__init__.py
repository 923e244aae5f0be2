"""Where roles run: launchers, training and engine workers, and who holds the devices."""
