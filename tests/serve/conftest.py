"""One tiered server for all tests of this folder, and a stock one in a process of its own to compare with."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import openai
import pytest

from expertier.engine_adapter.build.cache import CACHE_VARIABLE
from expertier.engine_adapter.hosts.server.server import ServerOptions, TieredServer
from expertier.engine_adapter.llama_cpp import LoadedEngine
from expertier.engine_adapter.models.synth import TINY_SHAPE, write_model
from expertier.engine_adapter.open import open_engine
from expertier.tiers.config.config import TierConfig
from expertier.tiers.model.table import ExpertTable
from limits.waits import child_process

Connect = Callable[..., openai.OpenAI]


@pytest.fixture(scope="session")
def ready_cache(cache_folder: str) -> Iterator[str]:
    """A cache folder with the plugin, for this process and its children."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(CACHE_VARIABLE, cache_folder)
        yield cache_folder


@pytest.fixture(scope="session")
def engine(ready_cache: str) -> LoadedEngine:
    """The wheel's engine with our plugin, in this process."""
    assert ready_cache
    return open_engine()


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that the engine runs."""
    return write_model(tmp_path_factory.mktemp("models") / "tiny.gguf", TINY_SHAPE)


@pytest.fixture(scope="session")
def start(engine: LoadedEngine, model: Path) -> Callable[..., TieredServer]:
    """Start a tiered server with half of the experts' slots, on a free port."""

    def start(config: TierConfig | None = None, **options: object) -> TieredServer:
        return TieredServer.start(
            engine,
            ExpertTable.from_gguf(model),
            config or TierConfig(expert_cache_bytes=4 << 20),
            ServerOptions(**{"port": 0, "n_parallel": 4, "n_ctx": 512, "n_threads": 1, **options}),
        )

    return start


@pytest.fixture(scope="module")
def server(start: Callable[..., TieredServer]) -> Iterator[TieredServer]:
    """A tiered server."""
    with start() as running:
        yield running
        running.tiers.check_valid()


@pytest.fixture(scope="session")
def connect() -> Iterator[Connect]:
    """Make a client of a server's address; all are closed at the end."""
    clients = []

    def connect(url: str, key: str = "none") -> openai.OpenAI:
        client = openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0, timeout=30)
        clients.append(client)
        return client

    yield connect
    for client in clients:
        client.close()


@pytest.fixture(scope="module")
def client(server: TieredServer, connect: Connect) -> openai.OpenAI:
    """The real client, connected to the tiered server."""
    return connect(server.url)


@pytest.fixture(scope="module")
def stock(model: Path, connect: Connect) -> Iterator[openai.OpenAI]:
    """The real client, connected to a stock server with the same parameters."""
    script = Path(__file__).parents[1] / "support" / "servers" / "stock_server.py"
    with child_process(
        sys.executable, script, model, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as child:
        assert child.stdout is not None
        yield connect(child.stdout.readline().strip())
        child.communicate(timeout=20)
        assert child.returncode == 0
