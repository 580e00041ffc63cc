"""Replaces a machine's GPU driver by another version, and goes back to the old one from the packages that it kept."""
