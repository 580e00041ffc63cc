"""Virtual machines with kernels and BMCs of their own, to try gpunodes on. Nobody who runs real machines needs it."""
