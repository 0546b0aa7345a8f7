"""What the oldest supported versions of libraries do otherwise than the newest."""

from importlib.metadata import version

import pytest
from packaging.version import Version


def skip_before(package: str, number: str, why: str) -> None:
    """Skip the test with older versions of a library."""
    if Version(version(package)) < Version(number):
        pytest.skip(f"{package} before {number} {why}")
