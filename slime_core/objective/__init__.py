"""From scores to credit, and from credit to the loss of one micro-batch."""
