"""How weights reach engines over servers: the trainer's ranks talk to the servers themselves, whatever program serves."""
