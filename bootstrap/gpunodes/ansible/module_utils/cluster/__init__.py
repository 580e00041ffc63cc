"""The cluster through its API: nodes, join tokens, objects, and the verification that nodes are ready."""
