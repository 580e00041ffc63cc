"""Repair, the pure part: who may be repaired now, by which rungs, and how far one machine has come."""
