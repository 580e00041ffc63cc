"""Backup and restore of the cluster's state."""
