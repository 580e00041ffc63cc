"""The pure part of repair: which machines may be repaired, escalation steps, stages and records."""
