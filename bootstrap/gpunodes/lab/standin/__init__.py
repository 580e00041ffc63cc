"""Stand-in GPUs for the lab's machines: a board, a driver and its library, in packages of NVIDIA's names.

They test on real kernels what gpunodes does with GPU machines. They compute nothing, and they are never installed
outside the lab.
"""
