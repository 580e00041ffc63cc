"""How to probe, and how a collector reports."""

import os
from typing import Any, Callable, Optional

TEXT_BYTES = 2 << 20
"""Maximum size of the kernel log, and of nvidia-smi's output."""
Emit = Callable[[str, Any], None]
"""Reports a fact, by its key in the document."""


class ProbeOptions:
    """How to probe: ``root`` is the file system root to read, ``deadline_s`` and ``smi_s`` are time limits."""

    def __init__(
        self,
        root: str = "/",
        deadline_s: float = 30.0,
        smi_s: float = 20.0,
        expected_gpus: Optional[int] = None,
    ) -> None:
        self.root = root
        self.deadline_s = deadline_s
        self.smi_s = min(smi_s, max(1.0, deadline_s - 3.0))
        self.expected_gpus = expected_gpus

    def path(self, name: str) -> str:
        """``name`` ("proc/uptime") below the root."""
        return os.path.join(self.root, name)
