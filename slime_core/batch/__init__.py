"""Accepted groups become a batch of columns, and a batch becomes packed micro-batches for every rank."""
