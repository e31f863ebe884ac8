"""C++ sources of the host library, as package data: `build` compiles them on the user's machine."""
