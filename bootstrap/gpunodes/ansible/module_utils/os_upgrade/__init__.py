"""Upgrades a machine's operating system: packages, kernels, and whether the machine must be rebooted afterwards."""
