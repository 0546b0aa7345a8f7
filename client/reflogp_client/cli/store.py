"""`reflogp store`: look at a store and check it."""

from __future__ import annotations

from typing import Annotated, Any

import typer

from reflogp_client.cli.console import EXIT_FAILED, err, out, print_json, progress_bar
from reflogp_store import LogprobStore

app = typer.Typer(no_args_is_help=True, help="Look at a store of log-probs and check it.")

Uri = Annotated[str, typer.Argument(help="Store: a folder, or s3://, gs://, az://.", metavar="URI")]
AsJson = Annotated[bool, typer.Option("--json", help="Print one object as the last line.")]


@app.command("ls")
def ls(uri: Uri, as_json: AsJson = False) -> None:
    """List the reference models of a store: id, name, dtype, latest snapshot, rows, size."""
    store = LogprobStore(uri)
    found: list[dict[str, Any]] = []
    for reference in store.references():
        table = store.table(reference.reference_id)
        shards, rows, size = table.totals()
        found.append(
            {
                "reference_id": reference.reference_id,
                "name": reference.name,
                "dtype": reference.dtype,
                "snapshot": table.snapshot_number(),
                "shards": shards,
                "sequences": rows,
                "bytes": size,
            }
        )
    if as_json:
        print_json({"store": store.uri, "references": found})
    elif not found:
        out.print(f"{store.uri} holds no reference yet")
    else:
        for entry in found:
            out.print(
                f"{entry['reference_id']}  {entry['name']} in {entry['dtype']}: snapshot {entry['snapshot']}, "
                f"{entry['sequences']:,} sequences, {entry['shards']:,} shards, {entry['bytes'] / 1e6:,.1f} MB"
            )


@app.command("verify")
def verify(uri: Uri, as_json: AsJson = False) -> None:
    """Read every page of every shard, check its checksum and its rows; name what is damaged (exit code 1)."""
    store = LogprobStore(uri)
    damaged = []
    for reference in store.references():
        table = store.table(reference.reference_id)
        with progress_bar(f"verifying {reference.name}") as bar:
            damaged += [
                {"reference_id": reference.reference_id, "shard": f"{table.uri}/{d.shard}", "problem": d.problem}
                for d in table.verify(bar.hashed)
            ]
    for entry in damaged:
        err.print(f"damaged: {entry['shard']}: {entry['problem']}", style="red", markup=False)
    if as_json:
        print_json({"store": store.uri, "damaged": damaged})
    elif not damaged:
        out.print(f"{store.uri}: every shard is whole")
    if damaged:
        raise typer.Exit(EXIT_FAILED)
