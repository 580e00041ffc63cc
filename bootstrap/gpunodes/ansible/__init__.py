"""What travels to the machines with Ansible: modules, and the standard-library-only code that they share with us."""
