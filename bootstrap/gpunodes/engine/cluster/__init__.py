"""The cluster over its Kubernetes API: nodes, pods, evictions and events.

The controller needs SSH only. ``session`` starts a small program on the control-plane machine, which forwards requests
to the API; ``api`` sends a request until it gets a valid response, or raises an error of ``errors``. ``client`` does
what commands need, and ``nodes``, ``marks`` and ``pods`` are pure: the objects of the API, and changes of them.
"""
