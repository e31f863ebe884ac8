"""`expertier serve`: the engine's own llama-server with the experts in the tiers, until a signal."""

from __future__ import annotations

import queue
import signal
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from expertier.cli import report
from expertier.cli.budget_options import (
    Device,
    ExpertCacheMib,
    FileMode,
    HostPoolFrac,
    HostPoolMib,
    Policy,
    Profile,
    SlabVmm,
    SplitMode,
    TensorSplit,
    tier_config,
)
from expertier.cli.early_checks import check_metrics, check_threads
from expertier.engine_adapter.abi.type_sizes import EngineTypes
from expertier.engine_adapter.hosts.server.server import ServerOptions, TieredServer, check_address
from expertier.engine_adapter.open import open_engine
from expertier.engine_adapter.telemetry.telemetry import say_disabled, show_events, watched
from expertier.errors import ExpertierError
from expertier.tiers.model.table import ExpertTable


def serve(
    model: Annotated[Path, typer.Argument(metavar="MODEL", help="A GGUF file.", show_default=False)],
    host: Annotated[
        str,
        typer.Option(help="Address to listen on. Other machines can reach any address but a loopback one."),
    ] = "127.0.0.1",
    allow_host: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="A name or address besides --host that clients ask for; may be given several times.",
            show_default=False,
        ),
    ] = None,
    port: Annotated[int, typer.Option(min=0, max=65535, help="0: a free one.")] = 8080,
    parallel: Annotated[int, typer.Option(min=1, help="Requests that run at once.")] = 1,
    ctx: Annotated[
        int, typer.Option("--ctx", "-c", min=1, help="Tokens of context for each request.")
    ] = 4096,
    threads: Annotated[int, typer.Option("--threads", "-t", min=0, help="0: one a processor.")] = 0,
    ubatch: Annotated[int, typer.Option(min=1, help="Tokens of a prompt that run at once.")] = 512,
    expert_cache_mib: ExpertCacheMib = None,
    host_pool_mib: HostPoolMib = None,
    host_pool_frac: HostPoolFrac = None,
    policy: Policy = None,
    file_mode: FileMode = None,
    slab_vmm: SlabVmm = None,
    profile: Profile = None,
    device: Device = None,
    tensor_split: TensorSplit = None,
    split_mode: SplitMode = None,
    api_key: Annotated[
        str | None,
        typer.Option(envvar="EXPERTIER_API_KEY", help="What clients must send; without it, anyone may ask."),
    ] = None,
    metrics_port: Annotated[
        int | None,
        typer.Option(min=0, max=65535, help="Prometheus metrics on this loopback port; 0: a free one."),
    ] = None,
    verbosity: Annotated[
        int, typer.Option(min=0, max=5, help="The engine's log: 1 errors, 2 warnings, 3 each request, 5 all.")
    ] = 2,
) -> None:
    """Serve the OpenAI API through the tiers until SIGINT or SIGTERM; SIGUSR1 logs a summary."""
    config = tier_config(
        expert_cache_mib,
        host_pool_mib,
        host_pool_frac,
        policy,
        file_mode,
        slab_vmm,
        profile,
        device,
        tensor_split,
        split_mode,
    )
    options = ServerOptions(
        host, port, parallel, ctx, ubatch, threads, api_key, verbosity, tuple(allow_host or ())
    )
    console = Console(stderr=True)
    check_threads(threads)
    check_address(options)
    check_metrics(metrics_port, options)
    table = ExpertTable.from_gguf(model, EngineTypes(lambda: open_engine(None, console.out)))
    with ExitStack() as stack:
        stack.enter_context(show_events())
        with report.progress(console) as say:
            engine = open_engine(None, say)
            say(f"loading {model.name}")
            ended = stack.enter_context(_end_signals())
            try:
                server = stack.enter_context(TieredServer.start(engine, table, config, options))
            except ExpertierError as error:
                say_disabled(model.name, str(error))
                raise
        stack.enter_context(watched(server.binding, config))
        if metrics_port is not None:
            from expertier.engine_adapter.telemetry.metrics import MetricsServer, TierCollector

            collector = TierCollector(server.tiers.stats, server.binding.counters)
            metrics = stack.enter_context(MetricsServer(collector, metrics_port, options.hosts))
            console.print(f"metrics on {metrics.url}", highlight=False, soft_wrap=True)
        if not options.is_loopback and not api_key:
            console.print(f"[yellow]anyone who reaches {host} may ask: give --api-key[/]", highlight=False)
        console.print(f"serving {model.name} on {server.url}", highlight=False, soft_wrap=True)
        ended.get()


@contextmanager
def _end_signals() -> Iterator[queue.SimpleQueue[int]]:
    """Yield a queue that gets SIGINT and SIGTERM while the block runs; a second signal of the same kind kills."""
    arrived: queue.SimpleQueue[int] = queue.SimpleQueue()

    def note(number: int, _frame: object) -> None:
        signal.signal(number, signal.SIG_DFL)
        arrived.put(number)

    numbers = (signal.SIGINT, signal.SIGTERM)
    previous = [signal.signal(number, note) for number in numbers]
    try:
        yield arrived
    finally:
        for number, handler in zip(numbers, previous, strict=True):
            signal.signal(number, handler)
