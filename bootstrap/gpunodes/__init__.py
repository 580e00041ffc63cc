"""Turn bare SSH machines into a GPU Kubernetes cluster, and keep it healthy."""

__version__ = "0.1.0"
