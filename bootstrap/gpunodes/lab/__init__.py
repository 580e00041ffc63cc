"""Virtual machines with kernels and BMCs of their own, to try gpunodes on. Clusters of real machines do not need it."""
