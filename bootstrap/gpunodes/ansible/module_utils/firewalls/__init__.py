"""The firewalls of an administrator, one file each: what they let in, and the rules that gpunodes adds to them."""
