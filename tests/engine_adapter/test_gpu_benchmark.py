"""`benchmarks/gpu_engine.py` on the CPU: it measures, goes on where it stopped, and sees what is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = ["--device", "CPU", "--small", "--steps", "8", "--warm", "4", "--prefill", "40", "--threads", "1"]


def run(folder: Path, *options: str) -> tuple[str, str]:
    """Run the benchmark; what it printed for others, and what it told meanwhile."""
    command = [sys.executable, str(BENCHMARKS / "gpu_engine.py"), "--folder", str(folder), *SMALL, *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout, done.stderr


@pytest.fixture
def parts(monkeypatch):
    """The benchmark's modules can be imported."""
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.mark.usefixtures("plugin")
def test_rows_are_measured_once(tmp_path):
    first, _ = run(tmp_path, "--rows", "vram", "ours-50", "cache-50", "--json")
    rows = json.loads(first)["rows"]
    ours = rows["small/ours-50"]
    for row in (ours, rows["small/vram"]):
        assert "failed" not in row
        assert row["replays"], "the model's routing was not replayed, or the output is wrong"
        assert row["decode"]["steps"] == 8
        assert row["prefill"]["40"]["tokens_per_s"] > 0
    counts = ours["decode"]["counts"]
    assert counts["l1.hits"] + counts["l1.misses"] == 8 * 4 * 4, "top-4 in four layers"
    assert counts["l2.hits"] == counts["l1.misses"] > 0, "each expert was read from the file before"
    assert "MoE cache requires a GPU" in rows["small/cache-50"]["failed"]

    options = ["--rows", "vram", "cache-50", "--stages", "rows", "table", "--stop-after", "0"]
    table, told = run(tmp_path, *options)
    assert "small/cache-50 is left for the next start" in told
    assert "small/vram" not in told, "measured already"
    assert "cache-50 FAILED: ended with status 2" in table
    assert "WRONG" not in table
    assert json.loads((tmp_path / "results.json").read_text())["rows"] == rows


@pytest.mark.deep
@pytest.mark.usefixtures("plugin")
def test_cold_starts_are_measured(tmp_path):
    """With a profile of the steps before, a process that has just begun reads less from the file while it decodes."""
    options = ["--steps", "80", "--cold-steps", "60", "--cold-rows", "ours-50", "--cold-files", "cached"]
    options += ["--cold-ways", "without", "waited", "--stages", "build", "models", "cold", "table"]
    table, _ = run(tmp_path, *options)
    found = json.loads((tmp_path / "results.json").read_text())["cold"]
    without, waited = (found[f"small/ours-50 {way} cached"] for way in ("without", "waited"))
    reads = []
    for row in (without, waited):
        assert "failed" not in row
        assert row["replays"], "the output is wrong"
        assert [len(each["steps_us"]) for each in row["passes"]] == [60, 60]
        cold, warm = (each["counts"] for each in row["passes"])
        assert "file.bytes_read" not in warm, "L2 holds all experts"
        reads.append(cold.get("file.bytes_read", 0))
    assert reads[1] < reads[0] / 2
    assert "small/ours-50 waited cached" in table


@pytest.mark.usefixtures("parts")
def test_when_a_process_is_warm():
    from gpu.cold import until_warm

    warm = np.full(120, 0.01)
    assert until_warm(warm, warm) == 50
    cold = warm.copy()
    cold[:3] = 1.0
    assert until_warm(cold, warm) == 53, "a window without the slow ones"
    cold[:3] = 0.028
    assert until_warm(cold, warm) == 50, "0.054 s of 0.5 are a tenth of what they take"
    cold[:3] = 0.029
    assert until_warm(cold, warm) == 51
    assert until_warm(2 * warm, warm) is None


@pytest.mark.usefixtures("plugin")
@pytest.mark.deep
def test_logits_are_compared(tmp_path):
    options = ["--parity", "--parity-models", "Q8_0", "--slots", "5", "--parity-ubatch", "64"]
    document = json.loads(run(tmp_path, *options, "--json")[0])
    (cases,) = [found["cases"] for found in document["parity"].values()]
    segments = cases["5 of 16"]["segments"]
    assert [found["rows"] for name, found in segments.items() if name.startswith("prefill")] == [300, 512]
    assert sum(name.startswith("decode") for name in segments) == 9
    assert all(found["identical"] for found in segments.values())
    assert cases["5 of 16"]["proxy"]["segments"] > 0, "the tiers served them"


@pytest.mark.usefixtures("parts")
def test_a_difference_is_seen():
    from gpu.parity import compare

    stock = np.random.default_rng(0).standard_normal((6, 9), np.float32)
    ours = stock.copy()
    assert compare(stock, ours)["identical"]
    ours[4, 2] = np.nextafter(ours[4, 2], np.float32(9))
    ours[5, 1] = 50
    found = compare(stock, ours)
    assert not found["identical"]
    assert (found["differing_rows"], found["first_row"]) == (2, 4)
    assert found["max_difference"] == pytest.approx(50 - stock[5, 1])
    assert found["argmax_agrees"] == pytest.approx(5 / 6)
    ours[0, 0] = np.nan
    assert compare(stock, ours)["max_difference"] == float("inf")


@pytest.mark.usefixtures("parts")
@pytest.mark.parametrize(
    ("end", "failed"),
    [
        ("import os; os.abort()", "ended by signal SIGABRT: last words"),
        ("sys.exit(3)", "ended with status 3: last words"),
        ("import time; time.sleep(600)", "killed after 10 s: last words"),
        ("", None),
    ],
)
@pytest.mark.deep
def test_what_was_found_before_a_failure_is_kept(tmp_path, end, failed):
    from gpu.child import run_child

    script = tmp_path / "parts" / "script.py"
    script.parent.mkdir()
    script.write_text(
        "import sys, json\n"
        "for n in (1, 2): print('RESULT ' + json.dumps({'n': n, **json.loads(sys.argv[1])}), flush=True)\n"
        f"print('last words', file=sys.stderr, flush=True)\n{end}\n"
    )
    found = run_child(script, {"given": 5}, timeout_s=10)
    assert (found["n"], found["given"]) == (2, 5)
    assert found.get("failed") == failed


@pytest.mark.usefixtures("parts")
def test_both_caches_get_the_same_memory(tmp_path):
    from gpu.models import ensure_model
    from gpu.rows import CPU_ROWS, GPU_ROWS, Row

    from expertier.tiers.model.table import ExpertTable

    model = ensure_model(tmp_path, "small", steps=8, trace=None, say=lambda _: None)
    table = ExpertTable.from_gguf(model.path)
    for percent in (100, 75, 50, 25):
        theirs, ours = (Row.parse(f"{side}-{percent}") for side in ("cache", "ours"))
        n_bytes = ours.cache_bytes(model, table)
        assert n_bytes == theirs.cache_bytes(model, table)
        if percent < 100:
            assert 0 <= model.expert_bytes * percent / 100 - n_bytes < 1 << 20
    assert n_bytes < model.expert_bytes
    full = Row.parse("ours-100").cache_bytes(model, table)
    assert full >= sum(demand.bytes_for(demand.n_experts) for demand in table.layer_demands())
    assert full >= model.expert_bytes + model.largest_expert_bytes, "llama.cpp's own has a slot more"
    small = Row.parse("ours-50-l2-25")
    assert (small.percent, small.host_percent) == (50, 25)
    assert (
        small.host_bytes(model, table) < model.expert_bytes <= Row.parse("ours-50").host_bytes(model, table)
    )
    assert all(Row.parse(name).name == name for name in GPU_ROWS)
    assert set(CPU_ROWS) < set(GPU_ROWS)
    for wrong in ("ours", "ours-0", "ours-101", "cache-50-l2-25", "vram-50"):
        with pytest.raises(SystemExit, match="no row"):
            Row.parse(wrong)


@pytest.mark.usefixtures("parts")
def test_rows_of_several_devices(monkeypatch):
    """llama.cpp's own cache splits no tensors: those rows are left out, and refused where they are asked for."""
    from gpu.options import parse

    asked = ["--device", "CUDA0", "--devices", "2", "--folder", "here"]
    by_layers = parse("", asked)
    monkeypatch.setenv("MOE_SPLIT_MODE", "tensor")
    by_tensors = parse("", asked)
    assert by_layers.device == by_tensors.device == "CUDA0,CUDA1"
    assert set(by_layers.rows) - set(by_tensors.rows) == {f"cache-{n}" for n in (100, 75, 50, 25)}
    assert {"vram", "ncmoe", "ours-50", "vram@1"} <= set(by_tensors.rows)
    assert parse("", [*asked, "--rows", "cache-50@1"]).rows == ["cache-50@1"]
    with pytest.raises(SystemExit):
        parse("", [*asked, "--rows", "ours-50", "cache-50"])


@pytest.mark.usefixtures("parts")
def test_without_the_engines_cache_ours_is_compared_with_the_cpu(capsys):
    from gpu.report import print_rows

    rows = {
        name: {"side": side, "percent": 50, "decode": {"tokens_per_s": speed, "median_ms": 1.0, "steps": 1}}
        for name, side, speed in (
            ("vram", "vram", 400.0),
            ("ncmoe", "ncmoe", 50.0),
            ("ours-50", "ours", 200.0),
        )
    }
    model = {"name": "m", "expert_bytes": 1 << 30, "n_steps": 1}
    print_rows(model, rows, None)
    said = capsys.readouterr().out.splitlines()
    assert "/ncmoe" in said[2]
    assert "4.00" in next(line for line in said if line.startswith("ours-50"))
    print_rows(model, rows | {"cache-50": {**rows["ours-50"], "side": "cache"}}, None)
    said = capsys.readouterr().out.splitlines()
    assert "/cache" in said[2]
    assert "1.00" in next(line for line in said if line.startswith("ours-50"))


@pytest.mark.usefixtures("parts")
def test_made_up_routing_has_locality():
    from gpu.routing import made_up_routing

    ids = made_up_routing(steps=60, layers=6, experts=128, top_k=6)
    assert ids.shape == (60, 6, 6)
    assert (np.diff(np.sort(ids, axis=2), axis=2) > 0).all(), "a step's experts are different ones"
    repeated = (ids[1:, :, :, None] == ids[:-1, :, None, :]).any(axis=3).mean()
    assert 0.3 < repeated < 0.45
    assert (ids == made_up_routing(steps=60, layers=6, experts=128, top_k=6)).all()


@pytest.mark.usefixtures("parts")
def test_the_log_of_the_engines_cache_is_read():
    from gpu.row_run import engine_cache

    log = (
        "llama_moe_cache: ubatch <= 8: hits = 310, misses = 74, hit rate = 80.73%, uploaded = 499.50 MiB\n"
        "llama_moe_cache: ubatch  > 8: hits = 1, misses = 2, hit rate = 33.33%, uploaded = 13.50 MiB\n"
        "llama_moe_cache: large batches: 96 experts copied from the cache, 648.00 MiB\n"
    )
    assert engine_cache(log) == {
        "ubatch <= 8": {"hits": 310, "misses": 74, "uploaded_mib": 499.5},
        "ubatch > 8": {"hits": 1, "misses": 2, "uploaded_mib": 13.5},
        "copied": {"experts": 96, "mib": 648.0},
    }
    assert engine_cache("") == {}
