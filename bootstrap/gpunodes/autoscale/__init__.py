"""The power server: switches machines on when pods wait for them, and off when they are idle.

Kubernetes' cluster-autoscaler decides; it asks this server by its external gRPC interface. The server knows the
machines of each pool and their BMCs. It runs beside the autoscaler in one pod, and keeps what must outlive that pod in
a ConfigMap, written before each order.
"""
