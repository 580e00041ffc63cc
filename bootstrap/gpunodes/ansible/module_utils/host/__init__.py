"""Brings a machine into a desired state; each change is recorded in the ledger before it is made."""
