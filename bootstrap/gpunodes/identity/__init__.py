"""Matches machines, nodes and BMCs. Pure functions; the only place that decides these matches."""
