"""Stand-in GPUs for the lab's machines: a board, a driver and its library, in packages of NVIDIA's names.

They prove what gpunodes does with GPU machines on real kernels. They compute nothing, and they are never installed
outside the lab.
"""
