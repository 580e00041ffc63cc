"""Machines over SSH: connections, host keys, root, and the Python programs that gpunodes sends."""
