"""Standard library only, Python 3.9 or newer: it runs on the machines."""
