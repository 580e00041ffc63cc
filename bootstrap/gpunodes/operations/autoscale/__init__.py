"""Pools that scale by power: the autoscaler of a cluster installed, shown and removed."""
