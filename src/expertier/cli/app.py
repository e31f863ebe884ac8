"""The command line: inspect, run, serve, demo, exec, synth, plan, probe, replay, profile, engine build, engine info.

Text and tables go to the terminal, `--json` prints one JSON object on one line, last, on standard output. Errors
of ours end with exit code 2 and a message that says what to do; `demo` ends with 1 when a check failed.
"""

from __future__ import annotations

import codecs
import json
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

import expertier
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
from expertier.cli.early_checks import check_prompt, check_threads, require_context
from expertier.cli.exec_command import exec_tool
from expertier.cli.plan_command import plan
from expertier.cli.probe_command import probe
from expertier.cli.profile_command import app as profile_app
from expertier.cli.replay_command import replay
from expertier.cli.serve_command import serve
from expertier.cli.standard_streams import guarded_streams
from expertier.cli.synth_command import synth
from expertier.engine_adapter.abi.type_sizes import EngineTypes
from expertier.engine_adapter.build.info import engine_info
from expertier.engine_adapter.hosts.demo import run_demo
from expertier.engine_adapter.hosts.measured_run import rss_peak_bytes
from expertier.engine_adapter.hosts.routing_recording import RoutingRecording
from expertier.engine_adapter.llama_cpp.vocabulary import count_tokens
from expertier.engine_adapter.open import open_engine, prepare_engine
from expertier.engine_adapter.telemetry.telemetry import say_disabled, show_events, watched
from expertier.engine_adapter.tiered_model import TieredModel
from expertier.errors import ConfigError, ExpertierError
from expertier.failures import explain
from expertier.planner.budget.context_memory import ContextShape
from expertier.tiers.model.table import ExpertTable
from expertier.units import MIB

app = typer.Typer(
    name="expertier",
    help="Runs Mixture-of-Experts models larger than VRAM or RAM on unmodified llama.cpp.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
engine_app = typer.Typer(help="The llama.cpp engine and our plugin for it.", no_args_is_help=True)
app.add_typer(engine_app, name="engine")
app.command("exec")(exec_tool)
app.add_typer(profile_app, name="profile")
app.command()(plan)
app.command()(probe)
app.command()(replay)
app.command()(serve)
app.command()(synth)

Model = Annotated[Path, typer.Argument(metavar="MODEL", help="A GGUF file.", show_default=False)]
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead of tables.")]
LlamaCpp = Annotated[
    Path | None,
    typer.Option(metavar="DIR", help="A llama.cpp that you built; without it, the installed wheel."),
]


def main() -> NoReturn:
    """Run the command line and exit."""
    try:
        with guarded_streams():
            app()
    except ExpertierError as error:
        raise _failed(str(error)) from None
    except (OSError, MemoryError) as error:
        raise _failed(explain(error)) from None
    except KeyboardInterrupt:
        raise SystemExit(130) from None
    raise SystemExit(0)


def _failed(message: str) -> SystemExit:
    with guarded_streams():
        Console(stderr=True).print(
            f"[bold red]error:[/] {report.escape(message)}", highlight=False, soft_wrap=True
        )
    return SystemExit(2)


@app.callback(invoke_without_command=True)
def _version(
    version: Annotated[bool, typer.Option("--version", help="Print the version and exit.")] = False,
) -> None:
    if version:
        print(expertier.__version__)
        raise typer.Exit


@app.command()
def inspect(
    model: Model,
    arena_mib: Annotated[
        float | None, typer.Option(metavar="MIB", help="Also say what an arena of this size would hold.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Show a model's experts: layers, bytes, quant types, and what an arena would hold."""
    table = ExpertTable.from_gguf(model)
    if arena_mib is not None and not 0 <= arena_mib < 1 << 40:
        raise ConfigError(f"--arena-mib is {arena_mib}: give a number of MiB, such as 4096")
    document = report.describe_table(table, None if arena_mib is None else int(arena_mib * MIB))
    if as_json:
        print(json.dumps(document))
    else:
        report.print_table(document, Console())


@app.command()
def run(
    model: Model,
    prompt: Annotated[str, typer.Option("--prompt", "-p", help="The text to continue.")],
    n_tokens: Annotated[int, typer.Option("--n-tokens", "-n", min=1, help="Most tokens to generate.")] = 128,
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
    ctx: Annotated[int | None, typer.Option("--ctx", "-c", min=1, help="Context length in tokens.")] = None,
    ubatch: Annotated[int, typer.Option(min=1, help="Tokens of a prompt that run at once.")] = 512,
    threads: Annotated[int, typer.Option("--threads", "-t", min=0, help="0: one a processor.")] = 0,
    temperature: Annotated[float, typer.Option(min=0.0, help="0: the likeliest token each time.")] = 0.0,
    seed: Annotated[
        int, typer.Option(min=0, max=2**32 - 1, help="Seed of the sampling at a temperature above 0.")
    ] = 0,
    record_routing: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write which experts were used, for `expertier replay`."),
    ] = None,
    llama_cpp: LlamaCpp = None,
    rpc: Annotated[
        str | None,
        typer.Option(
            metavar="HOST:PORT,...", help="llama.cpp RPC servers, whose devices are RPC0, RPC1, ..."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Continue a text through the tiers, then report what they did."""
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
    console = Console(stderr=True)
    check_threads(threads)
    check_prompt(prompt)
    if ctx is not None:
        require_context(ctx, 1, n_tokens)
    table = ExpertTable.from_gguf(model, EngineTypes(lambda: open_engine(llama_cpp, console.out)))
    with ExitStack() as stack:
        stack.enter_context(show_events())
        recording = None
        if record_routing is not None:
            recording = stack.enter_context(RoutingRecording(record_routing, table, n_ubatch=ubatch))
        with report.progress(console) as say:
            engine = open_engine(llama_cpp, say, rpc_servers=rpc.split(",") if rpc else ())
            if ctx is not None and (found := count_tokens(engine, table.path, prompt)) is not None:
                require_context(ctx, found, n_tokens)
            say(f"loading {model.name}")
            lookups = recording.log if recording is not None else None
            try:
                shape = ContextShape(n_ctx=ctx or 4096, n_ubatch=ubatch, full_windows=True)
                tiered = stack.enter_context(
                    TieredModel.open(engine, table, config, lookups=lookups, shape=shape)
                )
            except ExpertierError as error:
                say_disabled(model.name, str(error))
                raise
        stack.enter_context(watched(tiered.binding, config))
        tokens = tiered.model.tokenize(prompt)
        if not tokens:
            raise ConfigError("the prompt is empty: --prompt gave no tokens to continue; give it some text")
        n_ctx = ctx or max(min(tiered.model.n_ctx_train, 4096), len(tokens) + n_tokens)
        require_context(n_ctx, len(tokens), n_tokens)
        decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        pieces: list[str] = []

        def show(token: int) -> bool:
            if tiered.model.is_end(token):
                return False
            piece = decoder.decode(tiered.model.piece(token))
            pieces.append(piece)
            if not as_json:
                sys.stdout.write(piece)
                sys.stdout.flush()
            return True

        generation = tiered.generate(
            tokens,
            n_tokens,
            n_ctx=n_ctx,
            n_ubatch=ubatch,
            n_threads=threads,
            temperature=temperature,
            seed=seed,
            on_token=show,
            after_batch=recording.after_batch if recording is not None else None,
        )
        if not as_json:
            print(flush=True)
        document: dict[str, Any] = {
            "prompt_tokens": generation.prompt_tokens,
            "generated_tokens": len(generation.tokens),
            "prefill_tokens_per_s": generation.prefill_tokens_per_s,
            "decode_tokens_per_s": generation.decode_tokens_per_s,
            **tiered.describe(),
            "rss_peak_bytes": rss_peak_bytes(),
        }
    if as_json:
        print(json.dumps({"text": "".join(pieces), **document}))
    else:
        report.print_run(document, console)


@app.command()
def demo(llama_cpp: LlamaCpp = None, as_json: Json = False) -> None:
    """Run a random model on the stock engine and through the tiers, and check that the output is the same."""
    console = Console(stderr=True)
    with report.progress(console) as say:
        result = run_demo(say, llama_cpp=llama_cpp)
    if as_json:
        print(json.dumps(result.document))
    else:
        report.print_demo(result.document, Console())
    for broken in result.broken:
        console.print(f"[bold red]failed:[/] {report.escape(broken)}", highlight=False)
    if not result.passed:
        raise typer.Exit(1)


@engine_app.command("build")
def engine_build(
    llama_cpp: LlamaCpp = None,
    rebuild: Annotated[bool, typer.Option(help="Build even where a tested plugin exists.")] = False,
    as_json: Json = False,
) -> None:
    """Compile our plugin for the engine and test it."""
    with report.progress(Console(stderr=True)) as say:
        engine, plugin = prepare_engine(llama_cpp, say, rebuild=rebuild)
    document = {"engine": str(engine), "proxy": str(plugin.proxy_path), "host": str(plugin.host_path)}
    if as_json:
        print(json.dumps(document))
    else:
        report.print_fields("engine plugin", document, Console())


@engine_app.command("info")
def engine_information(llama_cpp: LlamaCpp = None, as_json: Json = False) -> None:
    """Say which engine, ggml version, interface version, devices and libraries are in use."""
    document = engine_info(llama_cpp).as_dict()
    if as_json:
        print(json.dumps(document))
    else:
        report.print_fields("engine", document, Console())
