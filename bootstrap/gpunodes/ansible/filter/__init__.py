"""Jinja filters of the roles; they run on the controller."""
