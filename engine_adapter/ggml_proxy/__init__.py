"""C++ sources of the plugin, as package data: `build` compiles them on the user's machine."""
