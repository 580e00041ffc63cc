"""Replaces a machine's container runtime and container toolkit, and goes back to the packages that it kept."""
