"""Middlewares on the way to the engines, and a router that runs them as a process of its own."""
