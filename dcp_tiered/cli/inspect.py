"""`dcp-tiered inspect URL ID`: what a checkpoint holds and where each byte of it lies."""

import argparse
import json
from typing import Any

from rich.table import Table

from dcp_tiered.cli import common
from dcp_tiered.errors import TieredError
from dcp_tiered.format import layout
from dcp_tiered.format.manifest import Manifest, decode_manifest
from dcp_tiered.format.records import Commit
from dcp_tiered.services import resolve
from dcp_tiered.services.shard_access import ShardAccess


def register(commands: Any) -> None:
    """Add the command."""
    parser = commands.add_parser("inspect", help="show items, shapes, extents and packs")
    parser.add_argument("url", metavar="URL", help="the run, such as tiered::s3://bucket/run42")
    parser.add_argument("checkpoint_id", metavar="ID", help="the checkpoint, such as step-1000")
    parser.add_argument("--local", help="this node's local tier, to look there first")
    parser.add_argument("--json", action="store_true", help="everything, as one JSON object")
    common.add_option_argument(parser)
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Show one checkpoint."""
    checkpoint_id = layout.check_checkpoint_id(arguments.checkpoint_id)
    built = common.build(arguments.url, arguments.local, arguments.option)
    try:
        catalog = built.catalog
        choice = resolve.choose(catalog, [resolve.offer(catalog, checkpoint_id)])
        if isinstance(choice, TieredError):
            raise choice
        choice = resolve.with_manifest(catalog, choice)
        manifest = decode_manifest(choice.manifest or b"")
        access = ShardAccess(manifest.head, choice.commit, built.local, built.durable)
        shown = _describe(manifest, choice.commit, access)
    finally:
        built.close()
    if arguments.json:
        print(json.dumps(shown, indent=2))
    else:
        _print(shown)
    return 0


def _describe(manifest: Manifest, commit: Commit | None, access: ShardAccess) -> dict[str, Any]:
    head = manifest.head
    placed = {place.shard: place for place in commit.placements} if commit else {}
    shards = []
    for shard in head.shards:
        place = placed.get(shard.name)
        shards.append(
            {
                "name": shard.name,
                "node": shard.node,
                "bytes": shard.length,
                "crc32c": f"{shard.crc32c:08x}",
                "pack": commit.packs[place.pack].name if commit and place else None,
                "start_in_pack": place.start if place else None,
            }
        )
    return {
        "checkpoint_id": head.checkpoint_id,
        "state": "durable" if commit else "local",
        "attempt": head.attempt,
        "step": head.step,
        "saved": common.moment(head.sequence),
        "world_size": head.world_size,
        "bytes": head.bytes_stored(),
        "metadata": _jsonable(head.metadata),
        "written_by": head.written_by,
        "shards": shards,
        "items": [item for entry in manifest.entries for item in _items(entry, manifest, access)],
    }


def _items(entry: Any, manifest: Manifest, access: ShardAccess) -> list[dict[str, Any]]:
    items = []
    for chunk in entry.chunks:
        index = access.index(chunk.shard)
        items.append(
            {
                "key": entry.fqn,
                "dtype": entry.dtype,
                "shape": list(entry.shape) if entry.dtype else None,
                "offsets": list(chunk.offsets) if entry.dtype else None,
                "sizes": list(chunk.sizes) if entry.dtype else None,
                "shard": manifest.head.shards[chunk.shard].name,
                "start": int(index.start[chunk.row]),
                "end": int(index.start[chunk.row] + index.length[chunk.row]),
            }
        )
    return items


def _print(shown: dict[str, Any]) -> None:
    out = common.console()
    out.print(
        f"[bold]{shown['checkpoint_id']}[/bold]: {shown['state']}, step {shown['step']}, saved"
        f" {shown['saved']} UTC by {shown['world_size']} ranks, {common.size(shown['bytes'])},"
        f" attempt {shown['attempt']}"
    )
    shards = Table(
        "shard file", "node", "size", "crc32c", "pack", "start in pack", title="shard files"
    )
    for shard in shown["shards"]:
        shards.add_row(
            shard["name"],
            shard["node"],
            common.size(shard["bytes"]),
            shard["crc32c"],
            shard["pack"] or "not uploaded",
            "" if shard["start_in_pack"] is None else str(shard["start_in_pack"]),
        )
    out.print(shards)
    items = Table("key", "dtype", "shape", "chunk", "shard file", "extent", title="items")
    for item in shown["items"]:
        chunk = "" if item["dtype"] is None else f"{item['sizes']} at {item['offsets']}"
        items.add_row(
            item["key"],
            item["dtype"] or "bytes",
            "" if item["dtype"] is None else str(item["shape"]),
            chunk if item["sizes"] != item["shape"] else "whole",
            item["shard"],
            f"[{item['start']}, {item['end']})",
        )
    out.print(items)


def _jsonable(value: Any) -> Any:
    """Return plain data with tuples as lists and keys as text."""
    if isinstance(value, dict):
        return {str(key): _jsonable(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [_jsonable(part) for part in value]
    return value
