"""Plugs the tiers into inference engines: llama.cpp through an out-of-tree ggml backend.

build/           the plugin, compiled on the user's machine against the engine's own headers
ggml_proxy/      its C++: the proxy device and the host shim
llama_cpp/       llama.cpp inside this process
exec_tool.py     a stock tool of the user's, with the tiers in its process (embedded.py)
server.py        the wheel's llama-server with the tiers
demo.py          stock and tiers side by side on a random model (synth.py writes it)
"""
