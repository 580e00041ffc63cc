"""The registry of the cluster: start it, let nodes trust it, verify it and take it away."""
