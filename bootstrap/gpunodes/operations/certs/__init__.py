"""When certificates end, and their renewal."""
