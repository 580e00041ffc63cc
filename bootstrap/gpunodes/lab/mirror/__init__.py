"""The lab's mirror: a static tree of packages and images, and its server. Its machines have no other network access."""

from gpunodes.lab.mirror.construct import build, settings
from gpunodes.lab.mirror.programs import REQUIRED_FILES, REQUIRED_PACKAGES, missing_packages

__all__ = ["REQUIRED_FILES", "REQUIRED_PACKAGES", "build", "missing_packages", "settings"]
