from __future__ import annotations

import ctypes
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from expertier.engine_adapter.build.compiler import (
    COMPILE_FLAGS,
    HOST_LIBRARY,
    PROXY_LIBRARY,
    compile_libraries,
    find_compiler,
    list_compilers,
    list_sources,
)
from expertier.errors import BuildError

if TYPE_CHECKING:
    from conftest import ToyCompiler


_OLD_COMPILER = """#!/bin/sh
[ "$1" = --version ] && echo old 4.8 && exit 0
echo "unknown -std=c++17"
exit 1
"""


def test_the_first_of_the_path_is_taken(toy_compiler: ToyCompiler) -> None:
    compiler = find_compiler({"PATH": str(toy_compiler.folder)})
    assert compiler.command == (str(toy_compiler.path),)
    assert compiler.version == "toy 1.0 (tests)"


def test_cxx_wins_and_may_have_arguments(toy_compiler: ToyCompiler, tmp_path: Path) -> None:
    other = tmp_path / "other c++"
    other.write_text(toy_compiler.path.read_text())
    other.chmod(0o755)
    compiler = find_compiler({"PATH": str(toy_compiler.folder), "CXX": f"'{other}' -m64"})
    assert compiler.command == (str(other), "-m64")


@pytest.mark.parametrize("text", [None, "#!/bin/sh\nexit 1\n", "no program"])
def test_a_cxx_that_does_not_run_is_an_error(
    toy_compiler: ToyCompiler, tmp_path: Path, text: str | None
) -> None:
    broken = tmp_path / "broken"
    if text is not None:
        broken.write_text(text)
        broken.chmod(0o755)
    with pytest.raises(BuildError, match="broken"):
        find_compiler({"PATH": str(toy_compiler.folder), "CXX": str(broken)})


def test_no_compiler_says_what_to_install(tmp_path: Path) -> None:
    assert list(list_compilers({"PATH": str(tmp_path)})) == []
    with pytest.raises(BuildError, match=r"no c\+\+, g\+\+, clang\+\+ on the PATH.*apt install g\+\+"):
        find_compiler({"PATH": str(tmp_path)})


def test_a_compiler_without_cpp17_is_passed_over(toy_compiler: ToyCompiler) -> None:
    (toy_compiler.folder / "g++").write_text(toy_compiler.path.read_text())
    (toy_compiler.folder / "g++").chmod(0o755)
    toy_compiler.write(
        '#!/bin/sh\n[ "$1" = --version ] && echo old 4.8 || { echo "unknown -std=c++17"; exit 1; }\n'
    )
    environ = {"PATH": str(toy_compiler.folder)}
    assert find_compiler(environ).command[0].endswith("g++")
    (toy_compiler.folder / "g++").unlink()
    with pytest.raises(BuildError, match=r"old 4\.8.* does not compile C\+\+17: unknown -std"):
        find_compiler(environ)


def test_one_compiler_under_two_names_is_one(toy_compiler: ToyCompiler) -> None:
    (toy_compiler.folder / "g++").symlink_to(toy_compiler.path)
    assert len(list(list_compilers({"PATH": str(toy_compiler.folder)}))) == 1


def test_sources_are_split_by_their_folders(toy_sources: Path) -> None:
    proxy, host = list_sources(toy_sources)
    assert [path.name for path in proxy] == ["proxy.cpp", "shared.cpp"]
    assert [path.name for path in host] == ["toy.cpp"]


def test_missing_sources_say_to_reinstall(toy_sources: Path) -> None:
    (toy_sources / "llama_host/toy.cpp").unlink()
    with pytest.raises(BuildError, match=r"0 of the host.*reinstall"):
        list_sources(toy_sources)


def test_every_file_is_compiled_and_each_library_linked(
    toy_compiler: ToyCompiler, toy_sources: Path, toy_llama: Path, tmp_path: Path
) -> None:
    messages: list[str] = []
    output = tmp_path / "out"
    proxy, host = compile_libraries(find_compiler(), toy_sources, toy_llama, output, messages.append)
    assert sorted(toy_compiler.made[:3]) == ["llama_host-toy.o", "one-proxy.o", "other-shared.o"]
    assert toy_compiler.made[3:] == [PROXY_LIBRARY, HOST_LIBRARY]
    assert "one-proxy.o" in proxy.read_text()
    assert "other-shared.o" in proxy.read_text()
    assert "llama_host-toy.o" not in proxy.read_text()
    assert "llama_host-toy.o" in host.read_text()
    made = (output / "objects/one-proxy.o").read_text()
    assert all(flag in made for flag in COMPILE_FLAGS)
    assert made.count("-isystem") == 3
    assert all(f"{toy_llama}/{name}" in made for name in ("include", "ggml/include", "ggml/src"))
    assert len(messages) == 1
    assert "3 files" in messages[0]


def test_real_libraries_work_and_hide_what_is_not_exported(
    toy_sources: Path, toy_llama: Path, tmp_path: Path
) -> None:
    proxy, host = compile_libraries(find_compiler(), toy_sources, toy_llama, tmp_path / "out")
    library = ctypes.CDLL(str(proxy))
    assert library.toy_proxy() == 42
    assert not hasattr(library, "hidden")
    assert ctypes.CDLL(str(host)).toy_host() == 7


def test_symbols_of_the_engine_may_stay_open(toy_sources: Path, toy_llama: Path, tmp_path: Path) -> None:
    (toy_sources / "ggml_proxy/other/shared.cpp").write_text(
        'extern "C" int llama_x(); int hidden() { return llama_x(); }'
    )
    proxy, _ = compile_libraries(find_compiler(), toy_sources, toy_llama, tmp_path / "out")
    with pytest.raises(OSError, match="llama_x"):
        ctypes.CDLL(str(proxy), mode=2)  # RTLD_NOW


def test_a_compile_error_shows_the_command_and_the_last_lines(
    toy_sources: Path, toy_llama: Path, tmp_path: Path
) -> None:
    (toy_sources / "ggml_proxy/other/shared.cpp").write_text("int hidden() { return no_such_name; }\n")
    with pytest.raises(BuildError) as caught:
        compile_libraries(find_compiler(), toy_sources, toy_llama, tmp_path / "out")
    message = str(caught.value)
    assert "-std=c++17" in message
    assert "shared.cpp" in message
    assert "no_such_name" in message


def test_a_missing_return_is_an_error(toy_sources: Path, toy_llama: Path, tmp_path: Path) -> None:
    (toy_sources / "ggml_proxy/other/shared.cpp").write_text("int hidden() {}\n")
    with pytest.raises(BuildError, match="return"):
        compile_libraries(find_compiler(), toy_sources, toy_llama, tmp_path / "out")
