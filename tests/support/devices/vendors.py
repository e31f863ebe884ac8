"""Which of the two fake drivers a slow test runs on in `make test`."""

from __future__ import annotations

import pytest

from expertier.hip.driver.vendor import Vendor

quick_on_hip = pytest.mark.parametrize(
    "vendor", [Vendor.HIP, pytest.param(Vendor.CUDA, marks=pytest.mark.deep)], indirect=True
)
"""On HIP's, as most users have that; on CUDA's in `make test-deep`. The quicker tests beside it run on both."""
