"""Locks on machines: Lease objects in the cluster, renewed while they are held, that expire when their holder dies.

``held`` takes, renews and releases the locks of one command. ``objects`` has the Lease objects, ``expiry`` whether one
that looks expired is held, ``holders`` the identity of a command in a Lease, and ``errors`` what stops a command that
has no lock, or no longer.
"""
