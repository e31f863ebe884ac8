"""The fake drivers, built once and clean before and after each test."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from expertier.hip import Device, open_device
from expertier.hip.driver.gpu import Gpu
from expertier.hip.driver.vendor import Vendor
from expertier.hip.fake import FakeDriver, FakeLibraries, build
from expertier.hip.open import open_driver_gpu

OpenGpu = Callable[..., Gpu]


@pytest.fixture(scope="session")
def fake_libraries() -> FakeLibraries:
    return build()


@pytest.fixture(params=list(Vendor))
def vendor(request: pytest.FixtureRequest) -> Vendor:
    chosen: Vendor = request.param
    return chosen


@pytest.fixture
def fake(vendor: Vendor, fake_libraries: FakeLibraries) -> Iterator[FakeDriver]:
    """The vendor's fake; a test leaves nothing behind on it."""
    driver = FakeDriver(getattr(fake_libraries, vendor))
    driver.reset()
    assert driver.live() == {}
    yield driver
    driver.reset()
    assert driver.live() == {}, "left on the fake driver"


@pytest.fixture
def open_fake(fake: FakeDriver, vendor: Vendor, fake_libraries: FakeLibraries) -> Callable[..., Device]:
    """Opens a device of the fake by its number."""
    del fake
    return lambda ordinal=0: open_device(f"{vendor}:{ordinal}", environ=fake_libraries.environ())


@pytest.fixture
def gpu(fake: FakeDriver, vendor: Vendor, fake_libraries: FakeLibraries) -> Iterator[Gpu]:
    """The fake's first GPU, without a device around it."""
    del fake
    gpu = open_driver_gpu(vendor, 0, fake_libraries.environ())
    yield gpu
    gpu.close()
