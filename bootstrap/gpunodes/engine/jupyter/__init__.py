"""Notebooks: their objects in the cluster, the tunnel to one, and its server's API."""
