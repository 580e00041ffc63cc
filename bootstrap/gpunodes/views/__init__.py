"""What a run shows: on a terminal, as plain lines, as JSON. Views know events and results, nothing else."""
