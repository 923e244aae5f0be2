"""How weights reach SGLang servers: the trainer's ranks talk to the servers themselves."""
