"""`headwater storage`: lists, verifies and prunes a directory of the file backend."""

import dataclasses
import json
import sys
from argparse import ArgumentParser, Namespace, _SubParsersAction
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headwater.cli.values import add_command
from headwater.errors import ConfigError

if TYPE_CHECKING:
    from headwater.storage.file.inspector import Finding, SlabSummary, StorageInspector

_ABOUT = """\
Look into a directory of the file backend (--kvcache-storage-backend file). All of it can be
done while servers use the directory: nothing that a living process owns is changed.

  headwater storage stats DIR               number and size of blocks, by model
  headwater storage ls DIR                  the slab files; with --blocks every block
  headwater storage verify DIR              read every block and check its header and checksum
  headwater storage verify DIR --repair     the same, and free slots with damaged or duplicate blocks
  headwater storage prune DIR --to 10GiB    delete the oldest slabs that no process owns
"""


def add_storage(commands: "_SubParsersAction[ArgumentParser]") -> None:
    """Add the command to the parser of `headwater`."""
    parser = add_command(commands, "storage {ls,stats,verify,prune} DIR [flags]", _ABOUT)
    actions = parser.add_subparsers(
        dest="action", metavar="ACTION", required=True, prog="headwater storage"
    )
    texts = {
        "ls": "list the slab files, oldest first",
        "stats": "number and size of blocks, by model",
        "verify": "read and check every block; exit 1 if a slot is damaged or duplicate",
        "prune": "delete slabs that no living process owns, oldest first",
    }
    for name, text in texts.items():
        action = actions.add_parser(
            name, help=text, description=f"{text[0].upper()}{text[1:]}.", allow_abbrev=False
        )
        action.add_argument("directory", metavar="DIR", type=Path, help="storage directory")
        action.add_argument("--json", action="store_true", help="print JSON")
        if name == "ls":
            action.add_argument("--blocks", action="store_true", help="list every block")
        if name == "verify":
            action.add_argument(
                "--repair",
                action="store_true",
                help="free slots with damaged or duplicate blocks, in slabs that no process owns",
            )
        if name == "prune":
            _add_prune(action)
        flags = [flag for entry in action._actions for flag in entry.option_strings]
        action.set_defaults(flags=flags)


def run_storage(options: Namespace) -> int:
    """Run one action and return the exit code."""
    from headwater.storage.file.inspector import StorageInspector

    inspector = StorageInspector(options.directory)
    if options.action == "ls":
        return _list(inspector, options)
    if options.action == "stats":
        return _stats(inspector, options)
    if options.action == "verify":
        return _verify(inspector, options)
    return _prune(inspector, options)


def _add_prune(parser: ArgumentParser) -> None:
    parser.add_argument(
        "--to",
        metavar="SIZE",
        help="stop when the directory takes at most this much, for example 10GiB",
    )
    parser.add_argument(
        "--model",
        metavar="HEX",
        help="delete only slabs whose model id begins with these digits",
    )
    parser.add_argument("--all", action="store_true", help="delete every slab without an owner")
    parser.add_argument(
        "--dry-run", action="store_true", help="only list what would be deleted"
    )


def _list(inspector: "StorageInspector", options: Namespace) -> int:
    if options.blocks:
        rows: list[dict[str, Any]] = [
            {
                "slab": name,
                "slot": entry.slot,
                "key": entry.key.hex(),
                "parent": entry.parent.hex(),
                "bytes": slab.geometry.form.block_bytes,
            }
            for name, slab, entry in inspector.blocks()
        ]
        lines = [f"{row['key']}  {_size(row['bytes'])}  {row['slab'][:8]}" for row in rows]
        return _print(options, {"blocks": rows}, lines)
    slabs = inspector.slabs()
    return _print(
        options,
        {"slabs": [dataclasses.asdict(slab) for slab in slabs]},
        [_line(slab) for slab in slabs],
    )


def _stats(inspector: "StorageInspector", options: Namespace) -> int:
    models: dict[str, dict[str, Any]] = {}
    for slab in inspector.slabs():
        sums = models.setdefault(
            slab.model, {"slabs": 0, "blocks": 0, "slots": 0, "bytes": 0, "in_use": 0}
        )
        sums["slabs"] += 1
        sums["blocks"] += slab.num_blocks
        sums["slots"] += slab.num_slots
        sums["bytes"] += slab.total_bytes
        sums["in_use"] += slab.in_use
    lines = [
        f"{_model(model)}  {sums['blocks']} of {sums['slots']} slots filled  "
        f"{_size(sums['bytes'])} in {_slabs(sums['slabs'])}, {sums['in_use']} in use"
        for model, sums in models.items()
    ]
    used = inspector.used_bytes
    return _print(
        options, {"used_bytes": used, "models": models}, [*lines, f"{_size(used)} in all"]
    )


def _verify(inspector: "StorageInspector", options: Namespace) -> int:
    result = inspector.verify(repair=options.repair)
    lines = [_finding(bad) for bad in result.findings]
    blocks = [bad for bad in result.findings if bad.slot is not None]
    num_copies = sum(bad.reason == "duplicate" for bad in blocks)
    total = (
        f"{result.blocks_good} blocks are whole, {len(blocks) - num_copies} are damaged, "
        f"{num_copies} slots hold second copies"
    )
    if options.repair:
        total += f"; {sum(bad.is_repaired for bad in blocks)} slots freed"
    _print(options, dataclasses.asdict(result), [*lines, total])
    return 1 if any(not bad.is_repaired for bad in result.findings) else 0


def _finding(bad: "Finding") -> str:
    if bad.slot is None:
        return f"damaged: slab {bad.slab[:8]} cannot be read, so no block in it is found"
    what = "duplicate" if bad.reason == "duplicate" else f"damaged ({bad.reason})"
    freed = ", slot freed" if bad.is_repaired else ""
    return f"{what}: block {bad.key[:16]} in slot {bad.slot} of slab {bad.slab[:8]}{freed}"


def _prune(inspector: "StorageInspector", options: Namespace) -> int:
    if options.to is None and options.model is None and not options.all:
        raise ConfigError("say what to prune: --to SIZE, --model HEX or --all")
    from headwater.storage.settings import parse_bytes

    to_bytes = None if options.to is None else parse_bytes(options.to)
    gone = inspector.prune(to_bytes=to_bytes, model=options.model, dry_run=options.dry_run)
    verb = "would delete" if options.dry_run else "deleted"
    freed = sum(slab.total_bytes for slab in gone)
    result = {
        "deleted": [] if options.dry_run else [slab.name for slab in gone],
        "would_delete": [slab.name for slab in gone] if options.dry_run else [],
        "freed_bytes": freed,
    }
    return _print(options, result, [f"{verb} {_slabs(len(gone))}, {_size(freed)}"])


def _line(slab: "SlabSummary") -> str:
    written = datetime.fromtimestamp(slab.written_at_s, UTC).strftime("%Y-%m-%d %H:%M")
    owner = "in use" if slab.in_use else "no owner"
    return (
        f"{slab.name[:8]}  {_model(slab.model)}  {slab.num_blocks}/{slab.num_slots} blocks "
        f"of {_size(slab.block_bytes)}  {_size(slab.total_bytes)}  {written}  {owner}"
    )


def _model(model: str) -> str:
    return f"model {model[:16]}" if model else "cannot be read"


def _print(options: Namespace, result: dict[str, Any], lines: list[str]) -> int:
    text = json.dumps(result, indent=2) if options.json else "\n".join(lines)
    sys.stdout.write(f"{text}\n" if text else "nothing\n")
    return 0


def _slabs(number: int) -> str:
    return "1 slab" if number == 1 else f"{number} slabs"


def _size(num_bytes: float) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.4g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.4g} TiB"
