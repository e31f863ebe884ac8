"""Other models in a tool under `expertier exec`: drafts, LoRA adapters, and what must not get into the tiers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from engine_runs.tiered_runs import SMALL, write_small_model
from expertier.engine_adapter.hosts.exec.tool import ToolCommand, prepare_tool
from expertier.engine_adapter.models.synth import write_model
from model_files.dense_models import write_dense_llama
from model_files.lora_files import write_lora
from servers.tool_server import EXEC, HALF_BUDGET, PATIENCE_S, PROMPTS, ToolServer, answers, events_of

pytestmark = pytest.mark.deep

EXPERTS = (SMALL.experts, SMALL.n_ff, SMALL.n_embd)
ADAPTERS: Mapping[str, Mapping[str, tuple[int, ...]]] = {
    "attention": {f"blk.{i}.attn_q.weight": (SMALL.heads * SMALL.head_dim, SMALL.n_embd) for i in range(2)},
    "router": {"blk.1.ffn_gate_inp.weight": (SMALL.experts, SMALL.n_embd)},
    "experts": {"blk.1.ffn_up_exps.weight": EXPERTS, "blk.1.ffn_down_exps.weight": EXPERTS},
}


@pytest.fixture(scope="module")
def tool(llama_cpp: Path) -> Path:
    return llama_cpp / "build" / "bin" / "llama-server"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


@pytest.fixture(scope="module")
def model(folder: Path) -> Path:
    return write_small_model(folder, "Q4_K+Q6_K")


@pytest.fixture(scope="module")
def plain(tool: Path, model: Path) -> list[str]:
    """What stock answers without an adapter or a draft."""
    return answers(tool, "-m", model, "--no-repack")[0]


@pytest.fixture(scope="module")
def without_draft(tool: Path, folder: Path) -> tuple[Path, list[str]]:
    """A model and what stock answers with it alone.

    Of Q8_0: with Q4_K the CPU backend's sums for several rows at once differ in their last bits from those for one
    row, and a draft changes stock's own answers.
    """
    model = write_small_model(folder, "Q8_0")
    return model, answers(tool, "-m", model, "--no-repack")[0]


@pytest.mark.parametrize("kind", ["dense", "another architecture", "same architecture", "same file"])
def test_a_draft_changes_no_token(
    tool: Path, folder: Path, without_draft: tuple[Path, list[str]], kind: str
) -> None:
    """A draft is loaded whole, by the tool, and the tiers stay the main model's."""
    model, plain = without_draft
    draft = model
    if kind == "dense":
        draft = write_dense_llama(folder / "dense.gguf", SMALL)
    elif kind == "another architecture":
        draft = write_model(folder / "olmoe.gguf", replace(SMALL, architecture="olmoe", kv_heads=4))
    elif kind == "same architecture":  # with tensors of the same names and shapes
        draft = write_model(folder / "other.gguf", replace(SMALL, seed=SMALL.seed + 1))
    drafting = ("-m", model, "-md", draft, "--spec-type", "draft-simple", "--no-repack")

    def replies(server: ToolServer) -> list[tuple[str, int, int]]:
        found = [server.answer(prompt) for prompt in PROMPTS]
        return [
            (reply["content"], reply["timings"]["draft_n"], reply["timings"]["draft_n_accepted"])
            for reply in found
        ]

    with ToolServer(tool, *drafting) as stock:
        expected = replies(stock)
    assert [content for content, *_ in expected] == plain
    assert all(n_drafted > 0 for _, n_drafted, _ in expected)
    with ToolServer(*EXEC, tool, *drafting, env=HALF_BUDGET) as server:
        assert replies(server) == expected
    if kind == "same file":
        assert sum(n_accepted for *_, n_accepted in expected) > 0
    assert int(events_of(server.said, "summary")[0]["hits"]) > 0


@pytest.mark.parametrize("kind", ["attention", "router"])
def test_a_lora_beside_the_experts_is_applied(
    tool: Path, model: Path, folder: Path, plain: list[str], kind: str
) -> None:
    adapter = write_lora(folder / f"{kind}.gguf", SMALL.architecture, ADAPTERS[kind])
    expected, _ = answers(tool, "-m", model, "--no-repack", "--lora", adapter)
    assert expected != plain
    assert answers(*EXEC, tool, "-m", model, "--lora", adapter, env=HALF_BUDGET)[0] == expected


@pytest.mark.parametrize("option", ["--lora", "--lora-scaled"])
def test_a_lora_over_experts_is_refused_by_name(tool: Path, model: Path, folder: Path, option: str) -> None:
    adapter = write_lora(folder / "experts.gguf", SMALL.architecture, ADAPTERS["experts"])
    scaled = f"{adapter}:0.5" if option == "--lora-scaled" else adapter
    said = fails_to_start(*EXEC, tool, "-m", model, option, scaled)
    (error,) = events_of(said, "error")
    assert "blk.1.ffn_down_exps.weight.lora_a is of a LoRA adapter over experts" in error["message"]


@pytest.mark.parametrize(
    "setting",
    [
        "cpu-moe = true",
        "n-cpu-moe = 1",
        "override-tensor = blk.1.ffn_up_exps=CPU",
        "override-tensor = blk.2.ffn_.*_exps=CPU",
    ],
)
def test_experts_that_a_configuration_file_moves_are_noticed(
    tool: Path, model: Path, tmp_path: Path, setting: str
) -> None:
    """The file's patterns come before ours, and the experts' places in the skeleton hold zeros."""
    config = tmp_path / "llama.cpp" / "config.ini"
    config.parent.mkdir()
    config.write_text(f"[*]\n{setting}\n")
    env = {**HALF_BUDGET, "XDG_CONFIG_HOME": str(tmp_path)}
    with ToolServer(*EXEC, tool, "-m", model, env=env) as server:
        assert "error" in server.answer(PROMPTS[0])
    errors = events_of(server.said, "error")
    assert "_exps.weight was placed outside of the tiers" in errors[0]["message"]


def test_another_models_experts_are_noticed(
    tool: Path, model: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A tool that loads a model of the same shapes instead of the skeleton, by whatever way."""
    other = write_model(folder / "another.gguf", replace(SMALL, seed=SMALL.seed + 2))
    monkeypatch.setenv("MOE_EXPERT_CACHE_MIB", HALF_BUDGET["MOE_EXPERT_CACHE_MIB"])
    prepared: ToolCommand = prepare_tool([str(tool), "-m", str(model)])
    command = (prepared.program, *prepared.arguments[1:], "-m", other)
    with ToolServer(*command, env=dict(prepared.environment)) as server:
        assert "error" in server.answer(PROMPTS[0])
    assert "another model" in events_of(server.said, "error")[0]["message"]


def fails_to_start(*command: object) -> str:
    """Start a server that ends by itself with an error, and return what it has said."""
    server = ToolServer(*command, env=HALF_BUDGET)
    assert server.process.wait(PATIENCE_S) == 1
    server.__exit__()
    return server.said
