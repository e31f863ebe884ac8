"""A driver and a runtime compiler without a GPU: HIP's and CUDA's symbol names over this machine's memory.

    libraries = build()                                   # compiled once, with the system's C and C++ compiler
    fake = FakeDriver(libraries.hip)                      # switches, counters, calls that fail on purpose
    with open_device("hip:0", environ=libraries.environ()) as device:
        fake.set("held", 1)                               # streams take no work until it is 0 again

A test that passes with the fake shows that bindings and logic are right; it shows nothing about hardware.

build.py     compiles the libraries, and returns their paths
control.py   switches and counters
*.c, *.cpp   the driver (settings, ranges, memory, virtual, streams, work, modules under the names of HIP and CUDA)
             and the compiler (rtc.cpp); cpu_device.h is what kernels are compiled with
"""

from __future__ import annotations

from expertier.hip.fake.build import FakeLibraries, build
from expertier.hip.fake.control import FakeDriver

__all__ = ["FakeDriver", "FakeLibraries", "build"]
