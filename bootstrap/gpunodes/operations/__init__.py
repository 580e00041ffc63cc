"""What the commands do: each one list of phases, walked by one function."""
