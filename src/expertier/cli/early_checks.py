"""Checks that a command makes before it loads a model: threads, ports, packages, the length of the context."""

from __future__ import annotations

import importlib.util
import os

from expertier.engine_adapter.hosts.server.server import ServerOptions, check_address
from expertier.errors import ConfigError

_METRICS_HOST = "127.0.0.1"


def check_threads(n_threads: int) -> None:
    """Raise ConfigError for more threads than processors: the engine's threads would spin, waiting for each other."""
    processors = len(os.sched_getaffinity(0))
    if n_threads > processors:
        raise ConfigError(
            f"--threads {n_threads} was asked for, but this process may use {processors} processors: more threads "
            f"only wait for each other; give {processors} or fewer, or 0 for one thread for each processor"
        )


def check_prompt(prompt: str) -> None:
    """Raise ConfigError for a prompt that is not text."""
    try:
        prompt.encode()
    except UnicodeEncodeError as error:
        raise ConfigError(
            f"--prompt is not UTF-8 at its character {error.start + 1}: give text, in a terminal that speaks UTF-8"
        ) from error


def require_context(n_ctx: int, n_prompt: int, n_new: int) -> None:
    """Raise ConfigError where a context is too short for a prompt and the tokens that follow it."""
    if n_ctx < n_prompt + n_new:
        raise ConfigError(
            f"--ctx {n_ctx} is too small for {n_prompt} prompt tokens and {n_new} new ones; "
            f"use --ctx {n_prompt + n_new} or fewer tokens"
        )


def check_metrics(port: int | None, server: ServerOptions) -> None:
    """Raise ConfigError where metrics cannot be served: the package is missing, or the port cannot be listened on."""
    if port is None:
        return
    if importlib.util.find_spec("prometheus_client") is None:
        raise ConfigError(
            "--metrics-port needs the package prometheus-client, which is not installed: pip install "
            "'expertier[serve]', or leave it out"
        )
    if port and port == server.port:
        raise ConfigError(f"--port and --metrics-port are both {port}: give two ports, or 0 for a free one")
    check_address(ServerOptions(_METRICS_HOST, port), option="--metrics-port")
