"""The lab's mirror: all that its machines see of the world, as one static tree and a server for it."""

from gpunodes.lab.mirror.construct import build, settings
from gpunodes.lab.mirror.programs import REQUIRED_FILES, REQUIRED_PACKAGES, missing_packages

__all__ = ["REQUIRED_FILES", "REQUIRED_PACKAGES", "build", "missing_packages", "settings"]
