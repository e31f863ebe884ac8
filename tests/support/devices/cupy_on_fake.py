"""Makes CuPy's ROCm wheel find the fake driver: the libraries that it is linked against, by name and symbol version.

CuPy needs some dozens of libraries of ROCm to be imported. What it calls for memory, streams and kernels is the fake
driver's; every other symbol is a stub that returns "not supported".
"""

from __future__ import annotations

import re
import subprocess
from collections import defaultdict
from importlib.resources import files
from pathlib import Path

from expertier.hip.fake.build import CORE

_NOT_SUPPORTED = 801
_CORE = (*CORE, "hip_names.c")
_DRIVER = "libamdhip64.so.7"
_OURS = re.compile(r"lib(amdhip|roc|hip|rccl)")


def make_libraries(site: Path, hiprtc: Path, folder: Path) -> None:
    """Write to `folder` all of ROCm that the wheel under `site` links against; `hiprtc` is the fake compiler."""
    folder.mkdir(parents=True)
    objects = sorted(site.glob("cupy*/**/*.so"))
    needed: set[str] = set()
    versions: dict[str, dict[str, set[str]]] = defaultdict(lambda: defaultdict(set))
    unversioned: set[str] = set()
    for path in objects:
        _read_object(path, needed, versions, unversioned)
    source = files("expertier.hip.fake")
    for name in (*_CORE, "fake.h"):
        (folder / name).write_bytes(source.joinpath(name).read_bytes())
    _run(
        ["cc", "-std=c11", "-O1", "-w", "-shared", "-fPIC", "-pthread", *_CORE, "-o", "plain.so", "-ldl"],
        folder,
    )
    have = set(re.findall(r" T (\w+)", _run(["nm", "-D", "plain.so"], folder)))
    wanted = {symbol for symbols in versions[_DRIVER].values() for symbol in symbols}
    in_driver = have | wanted
    (folder / "stubs.c").write_text(_stubs(wanted - have))
    (folder / "driver.map").write_text(_version_script(versions[_DRIVER], have - wanted))
    _run(
        ["cc", "-std=c11", "-O1", "-w", "-shared", "-fPIC", "-pthread", *_CORE, "stubs.c", "-o", _DRIVER, "-ldl",
         "-Wl,--version-script=driver.map", f"-Wl,-soname,{_DRIVER}", str(hiprtc), f"-Wl,-rpath,{hiprtc.parent}",
         "-Wl,--no-as-needed"],
        folder,
    )  # fmt: skip
    rest = unversioned - in_driver
    rest = {name for name in rest if not name.startswith("hiprtc")}
    for library in sorted(needed - {_DRIVER}):
        symbols = {symbol for names in versions[library].values() for symbol in names}
        (folder / "rest.c").write_text(_stubs(symbols | rest))
        (folder / "rest.map").write_text(_version_script(versions[library], rest))
        script = ["-Wl,--version-script=rest.map"] if versions[library] else []
        _run(
            ["cc", "-w", "-shared", "-fPIC", "rest.c", "-o", library, f"-Wl,-soname,{library}", *script],
            folder,
        )
        rest = set()


def _read_object(
    path: Path, needed: set[str], versions: dict[str, dict[str, set[str]]], unversioned: set[str]
) -> None:
    headers = _run(["objdump", "-p", str(path)], path.parent)
    needed |= {name for name in re.findall(r"NEEDED\s+(\S+)", headers) if _OURS.match(name)}
    library_of: dict[str, str] = {}
    current = ""
    for line in headers.splitlines():
        if found := re.match(r"\s+required from (\S+):", line):
            current = found[1]
        elif found := re.match(r"\s+0x\w+\s+0x\w+\s+\d+\s+(\S+)", line):
            library_of[found[1]] = current
    for line in _run(["nm", "-D", "--undefined-only", str(path)], path.parent).splitlines():
        symbol, _, version = line.split()[-1].partition("@")
        version = version.lstrip("@")
        if version and _OURS.match(library_of.get(version, "")):
            versions[library_of[version]][version].add(symbol)
        elif not version and re.match(r"(hip|roc|nccl|roctx)", symbol):
            unversioned.add(symbol)


def _stubs(symbols: set[str]) -> str:
    return "".join(f"int {symbol}() {{ return {_NOT_SUPPORTED}; }}\n" for symbol in sorted(symbols))


def _version_script(versions: dict[str, set[str]], base: set[str]) -> str:
    if not versions:
        return "{ global: *; };\n"
    lines, before = [], ""
    for i, version in enumerate(sorted(versions)):
        names = versions[version] | (base if i == 0 else set())
        hidden = " local: *;" if i == 0 else ""
        lines.append(
            f"{version} {{ global: {' '.join(f'{name};' for name in sorted(names))}{hidden} }}{before};"
        )
        before = f" {version}"
    return "\n".join(lines) + "\n"


def _run(command: list[str], folder: Path) -> str:
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout
