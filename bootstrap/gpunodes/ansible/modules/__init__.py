"""Ansible modules. Each gathers its parameters, calls one function of module_utils and exits."""
