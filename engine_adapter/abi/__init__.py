"""The C structs of the plugin's two libraries, and the engine with both loaded."""
