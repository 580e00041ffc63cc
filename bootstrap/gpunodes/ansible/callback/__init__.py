"""Callback plugins of the playbooks; they run on the controller."""
