"""Repair of machines, in files in the order in which a repair passes through them.

``commands`` (the whole command), ``context`` (what it works with), ``unfinished`` (repairs to resume), ``scanning``,
``deciding``, ``starting``, ``running`` (the repairs in
parallel), ``locking``; then for one machine ``stages``, ``tools``, ``escalating`` and ``verifying``. The decisions
themselves are pure: the package ``gpunodes.repair``.
"""
