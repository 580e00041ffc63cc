"""Adapters to the outside: SSH, Ansible, the Kubernetes API, BMCs and files; one module for each."""
