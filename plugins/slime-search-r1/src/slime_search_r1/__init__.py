"""Multi-turn search: a generator, its reward, and the retrieval server that it asks."""
