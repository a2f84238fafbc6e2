"""`headwater check`: whether a model would be served, and what fits where, without loading it."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from headwater.cli import main
from headwater.device.survey import survey
from headwater.errors import ModelError

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "hidden_size": 64,
    "intermediate_size": 96,
    "vocab_size": 128,
    "max_position_embeddings": 512,
    "dtype": "float16",
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with everything except real sizes."""
    _write_config(tmp_path)
    save_file(
        {"a": np.zeros((100, 10), dtype=np.float32), "b": np.zeros(50, dtype=np.float16)},
        tmp_path / "model.safetensors",
    )
    (tmp_path / "tokenizer.json").write_text("{}")
    return tmp_path


def _write_config(folder: Path, **changed: object) -> None:
    (folder / "config.json").write_text(json.dumps({**CONFIG, **changed}))


def _report(capsys: pytest.CaptureFixture[str], *arguments: str) -> dict[str, Any]:
    main(["check", *arguments, "--json"])
    report: dict[str, Any] = json.loads(capsys.readouterr().out)
    return report


def test_check_reports_how_the_model_is_served_and_what_fits(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The report has the weights in the serving type, the KV of a token and of a block, and the
    tokens that fit in each tier."""
    sizes = ("--device-gib", "16", "--swap-space", "1", "--storage-gib", "2")
    report = _report(capsys, str(folder), *sizes)

    assert report["served"] is True
    assert report["path"] == "fused"
    assert report["weights"]["bytes"] == (1000 + 50) * 2
    assert report["kv"]["token_bytes"] == 2 * 2 * 2 * 16 * 2
    tiers = report["tiers"]
    assert tiers["host"]["tokens"] == (1 << 30) // report["kv"]["block_bytes"] * 64
    assert tiers["storage"]["blocks"] == (2 << 30) // (report["kv"]["block_bytes"] + 160)
    assert tiers["device"]["blocks"] * report["kv"]["block_bytes"] > 0.8 * (16 << 30)


def test_the_text_has_a_line_for_each_part(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The text is readable without knowing the JSON; the exit code is 0 if the model would be
    served."""
    code = main(["check", str(folder), "--device", "cpu", "--swap-space", "1"])

    printed = capsys.readouterr().out
    assert code == 0
    for part in ("model", "served    yes", "weights", "KV", "context", "device    cpu", "host"):
        assert part in printed


def test_a_refused_model_is_exit_code_1_with_the_reason(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The reason is in the text and in the JSON."""
    _write_config(folder, model_type="mamba")

    assert main(["check", str(folder)]) == 1
    assert "served    no: model type 'mamba'" in capsys.readouterr().out
    assert "recurrent" in _report(capsys, str(folder))["reason"]


def test_weights_that_leave_no_room_are_reported(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The model is supported, but not here: the device's line has the reason."""
    report = _report(capsys, str(folder), "--device-gib", "0.5")

    assert report["tiers"]["device"]["blocks"] == 0
    assert "no block fits" in report["tiers"]["device"]["reason"]


def test_a_gpu_without_known_free_memory_needs_a_size(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The message names the flag."""
    monkeypatch.setenv("PATH", "")

    assert main(["check", str(folder), "--device", "cuda"]) == 1
    assert "give --device-gib" in capsys.readouterr().err


def test_folders_that_are_not_whole_are_refused(folder: Path) -> None:
    """Each fault of a download is named: a missing part, a truncated file, no tokenizer."""
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    path.write_bytes(whole[:-8])
    with pytest.raises(ModelError, match="is truncated"):
        survey(folder)
    path.write_bytes(b"\xff" * 64)
    with pytest.raises(ModelError, match="not a safetensors file"):
        survey(folder)
    path.write_bytes((20).to_bytes(8, "little") + b"[1, 2, 3, 4, 5, 6]  ")
    with pytest.raises(ModelError, match="damaged safetensors header"):
        survey(folder)
    path.write_bytes(whole)
    index = folder / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": "model.safetensors", "b": "two.st"}}))
    with pytest.raises(ModelError, match=r"1 of 2 weight files are missing.*two\.st"):
        survey(folder)
    index.unlink()
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"no tokenizer\.json"):
        survey(folder)
    with pytest.raises(ModelError, match="absent does not exist"):
        survey(folder / "absent")


def test_torch_is_not_imported(folder: Path) -> None:
    """The command answers in a second on a machine without the engine's libraries."""
    code = (
        "import sys; from headwater.cli import main; main(sys.argv[1:]); "
        "sys.exit(3 if {'torch', 'transformers'} & set(sys.modules) else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "check", str(folder), "--device", "cpu"],
        check=False,
        capture_output=True,
        timeout=60,
    )

    assert done.returncode == 0, done.stderr
