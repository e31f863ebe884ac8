"""`expertier exec -- TOOL …`: a tool of the user's own llama.cpp, with the tiers in its process."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from expertier.cli import report
from expertier.engine_adapter.hosts.exec.tool import model_name, prepare_tool
from expertier.engine_adapter.telemetry.telemetry import say_disabled, show_events
from expertier.errors import ExpertierError


def exec_tool(
    command: Annotated[
        list[str],
        typer.Argument(metavar="-- TOOL [ARGUMENT]...", help="For instance llama-server -m MODEL.gguf."),
    ],
    llama_cpp: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="The llama.cpp that the tool belongs to; by default the folder that it lies in.",
        ),
    ] = None,
) -> None:
    """Run llama-server, llama-cli or llama-bench of a llama.cpp of yours with the experts in the tiers.

    Budgets come from the variables (MOE_EXPERT_CACHE_MIB and so on). The tool's own options work as usual, except those
    that would place the experts elsewhere. SIGUSR1 logs a summary, and so does the tool's end.
    """
    with show_events():
        try:
            with report.progress(Console(stderr=True)) as say:
                tool = prepare_tool(command, llama_cpp=llama_cpp, progress=say)
        except ExpertierError as error:
            say_disabled(model_name(command), str(error))
            raise
    tool.execute()
