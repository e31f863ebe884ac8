"""The wheel's llama-server without the tiers and without repacking: prints its address, ends when its input does."""

from __future__ import annotations

import sys

from expertier.engine_adapter.hosts.server.server import ServerOptions, stock_params

if __name__ == "__main__":
    import xllamacpp

    params = stock_params(sys.argv[1], ServerOptions(port=0, n_parallel=4, n_ctx=512, n_threads=1))
    server = xllamacpp.Server(params)
    print(server.listening_address, flush=True)
    sys.stdin.read()
