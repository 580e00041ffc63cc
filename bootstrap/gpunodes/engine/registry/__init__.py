"""The registry of the cluster: its objects, and the registry's own API."""
