"""The outside world, one file a neighbour."""
