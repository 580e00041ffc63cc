"""The output of commands: on a terminal, as plain lines, as JSON. Views depend only on events and results."""
