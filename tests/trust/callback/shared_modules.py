"""Ansible's cache of built modules, shared by the runs of one test session.

Ansible builds the archive of a module once a run, in a folder of the run: a fifth of the processor time of a walk. The
sources do not change during a session. Ansible writes, locks and reads the cache as it does within one run.
"""

from __future__ import annotations

import os
from pathlib import Path

from ansible import constants
from ansible.plugins.callback import CallbackBase

DOCUMENTATION = """
name: shared_modules
type: aggregate
short_description: Shares Ansible's cache of built modules between runs
description: For tests only.
"""

_OWN = Path(constants.DEFAULT_LOCAL_TMP) / "ansiballz_cache"
if not _OWN.exists():
    _OWN.symlink_to(os.environ["GPUNODES_SHARED_MODULES"])


class CallbackModule(CallbackBase):  # type: ignore[misc]  # Ansible has no types
    """The class that Ansible loads; importing this module does the work."""

    CALLBACK_VERSION = 2.0
    CALLBACK_TYPE = "aggregate"
    CALLBACK_NAME = "shared_modules"
