"""Shared storage: the machine that serves it, the nodes that mount it, and what pods claim."""
