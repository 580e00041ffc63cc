"""What is wrong with a GPU machine, from what it says of itself: pure, standard library only.

The way: ``sources`` recognises files and unpacks them, ``scan`` finds the lines of interest in them, ``forms`` knows
how those lines are written, ``smi`` reads nvidia-smi, ``rules`` turn all of it into findings, ``judge`` into a verdict.
"""
