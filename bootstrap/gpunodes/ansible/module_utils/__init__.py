"""Code that modules share; Ansible finds the package ``gpunodes`` in it."""
