"""C++ sources of the proxy library, as package data: `build` compiles them on the user's machine."""
