"""`reflogp store`: inspect, verify, compact and share a store, and drop rows from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any

import typer

from reflogp.cli import options
from reflogp.cli.console import EXIT_FAILED, err, out, print_result, progress_bar
from reflogp.store import LogprobTable, Reference, ReflogpError, Store, UsageError, import_folder
from reflogp.store.exchange import Imported
from reflogp.store.hub import pull, push_table
from reflogp.store.maintenance import RETENTION_HOURS
from reflogp.store.texts import byte_count, counted

app = typer.Typer(no_args_is_help=True, help="Inspect, verify, compact and share a store of log-probs, and drop rows from it.")

ReferenceId = Annotated[
    str | None,
    typer.Option(
        "--reference",
        help="Id of one reference, or the first characters of its id. Default: all references or, for export and push, the "
        "store's only reference.",
        metavar="ID",
    ),
]
TopK = Annotated[
    int,
    typer.Option(min=0, help="Take the table with the K most probable tokens of each position (`score --top-k`).", metavar="K"),
]
Repository = Annotated[
    str,
    typer.Argument(help="Dataset repository: hf://datasets/ORGANISATION/NAME (pull: or NAME@REVISION).", metavar="REPOSITORY"),
]


def _references(store: Store, beginning: str | None) -> list[Reference]:
    """Return all references of a store or, if the beginning of an id is given, the one reference whose id begins so."""
    references = store.references()
    found = [one for one in references if beginning is None or one.reference_id.startswith(beginning)]
    if beginning is not None and len(found) != 1:
        raise UsageError(
            f"--reference {beginning} must be the beginning of exactly one reference id, but is the beginning of {len(found)} "
            f"ids in {store.uri}; the store has: {_names(references)}"
        )
    return found


def _names(references: list[Reference]) -> str:
    return ", ".join(f"{one.reference_id} ({one.name}, {one.dtype})" for one in references) or "none"


def _one_table(uri: str, beginning: str | None, top_k: int) -> LogprobTable:
    store = Store(uri)
    references = _references(store, beginning)
    if len(references) != 1:
        raise UsageError(f"choose one reference with --reference; the store {uri} has: {_names(references)}")
    return store.top_table(references[0], top_k) if top_k else store[references[0].reference_id]


def _each(
    uri: str,
    beginning: str | None,
    as_json: bool,
    name: str,
    work: Callable[[LogprobTable], tuple[str, list[dict[str, Any]]]],
) -> list[dict[str, Any]]:
    """Call `work` for every table. It returns a line, and the entries that --json prints under `name`. Return all entries.

    An error of one of several tables is printed, and the others are worked on before the command exits.
    """
    store = Store(uri)
    references = _references(store, beginning)
    results: list[dict[str, Any]] = []
    failed: dict[str, str] = {}
    for reference_id in (reference.reference_id for reference in references):
        try:
            done = [(table.top_k, *work(table)) for table in store.tables(reference_id)]
        except ReflogpError as error:
            if len(references) == 1:
                raise
            err.print(f"reflogp: {reference_id}: {error}", style="red")
            failed[reference_id] = str(error)
            continue
        for top_k, line, entries in done:
            more = {"top_k": top_k} if top_k else {}
            results += [{"reference_id": reference_id, **more, **entry} for entry in entries]
            if line and not as_json:
                out.print(f"{reference_id}{f' top-{top_k}' if top_k else ''}: {line}")
    empty = () if references else (f"{store.uri} contains no references yet",)
    print_result({"store": store.uri, name: results, "failed": failed}, as_json, *empty)
    if failed:
        raise typer.Exit(EXIT_FAILED)
    return results


@app.command("ls")
def ls(uri: options.StoreArgument, as_json: options.AsJson = False) -> None:
    """List a store's reference models: id, name, dtype, latest snapshot, number of sequences and shards, and size.

    Example: reflogp store ls ./logps
    """

    def describe(table: LogprobTable) -> tuple[str, list[dict[str, Any]]]:
        shards, rows, size = table.totals()
        name, dtype, snapshot = table.reference.name, table.reference.dtype, table.snapshot_number()
        held = f"{counted(rows, 'sequence')}, {counted(shards, 'shard')}, {byte_count(size)}"
        entry = {"name": name, "dtype": dtype, "snapshot": snapshot, "shards": shards, "sequences": rows, "bytes": size}
        return f"{name} in {dtype}, snapshot {snapshot}, {held}", [entry]

    _each(uri, None, as_json, "references", describe)


@app.command("verify")
def verify(
    uri: options.StoreArgument,
    reference: ReferenceId = None,
    repair: Annotated[
        bool, typer.Option("--repair", help="Drop damaged shards with all their rows, in a new snapshot.")
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Read every page of every shard, verify checksums and rows, and list damaged shards.

    This command needs no model; `reflogp verify` checks that values are the model's, by computing some of them again.

    The exit code is 1 if there is damage and --repair was not given. After a repair, the next `reflogp score` with the same
    data scores the rows of the dropped shards again.

    Example: reflogp store verify ./logps
    """

    def check(table: LogprobTable) -> tuple[str, list[dict[str, Any]]]:
        with progress_bar(f"verifying {table.reference.name}") as bar:
            found = table.verify(bar.hashed)
        for damage in found:
            err.print(f"damaged: {table.uri}/{damage.file} ({damage.rows:,} rows): {damage.problem}", style="red")
        line = "" if found else "every shard is intact"
        if found and repair:
            done = table.drop(shards=[damage.file for damage in found])
            rows = counted(table.totals()[1], "row")
            line = f"repaired: snapshot {done.snapshot} has {rows}; run `reflogp score` to score the dropped rows again"
        return line, [{**asdict(damage), "file": f"{table.uri}/{damage.file}", "repaired": repair} for damage in found]

    damaged = _each(uri, reference, as_json, "damaged", check)
    if damaged and not repair:
        err.print("--repair drops the damaged shards; the next `reflogp score` scores their rows again")
        raise typer.Exit(EXIT_FAILED)


@app.command("compact")
def compact(uri: options.StoreArgument, reference: ReferenceId = None, as_json: options.AsJson = False) -> None:
    """Merge shards into larger shards, and keep only one row for each key.

    Other processes may use the store during the compaction. Scoring automatically merges small shards; this command merges
    shards of all sizes. The replaced shards remain until `reflogp store vacuum` deletes them.

    Example: reflogp store compact ./logps
    """

    def work(table: LogprobTable) -> tuple[str, list[dict[str, Any]]]:
        with progress_bar(f"compacting {table.reference.name}") as bar:
            done = table.compact(progress=bar.hashed)
        result = f"{done.shards_before} -> {done.shards_after} shards, {done.rows:,} rows rewritten"
        if not done.won:
            result = "another process has already compacted the same shards"
        return result, [asdict(done)]

    _each(uri, reference, as_json, "compacted", work)


@app.command("vacuum")
def vacuum(
    uri: options.StoreArgument,
    reference: ReferenceId = None,
    retention_hours: Annotated[
        int,
        typer.Option(
            min=0,
            help="Number of hours to keep shards that compaction has replaced, and files of crashed writers. Readers of older "
            "snapshots may need these shards.",
        ),
    ] = RETENTION_HOURS,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Report what would be deleted, but delete nothing.")] = False,
    alone: Annotated[
        bool,
        typer.Option("--alone", help="Allow a retention period of 0 hours. Use this only if no other process uses the store."),
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Delete shards that compaction has replaced, and files of crashed writers, after a retention period.

    The period starts when a shard is replaced or a file is written. A snapshot that needs a deleted shard can no longer be
    read: reading the snapshot fails with an error that explains why.

    Example: reflogp store vacuum ./logps --dry-run
    """

    def work(table: LogprobTable) -> tuple[str, list[dict[str, Any]]]:
        files = table.vacuum(retention_hours, dry_run=dry_run, alone=alone)
        deleted = f"{counted(len(files), 'file')} {'would be ' if dry_run else ''}deleted"
        return deleted, [{"dry_run": dry_run, "files": files}]

    _each(uri, reference, as_json, "deleted", work)


@app.command("drop")
def drop(
    uri: options.StoreArgument,
    provenance: Annotated[
        str,
        typer.Option(
            help='Entries of the provenance of the rows to drop, as JSON, such as \'{"engine": "vllm"}\'. The rows of an '
            "export have their provenance in the column `provenance`.",
            metavar="JSON",
        ),
    ],
    reference: ReferenceId = None,
    as_json: options.AsJson = False,
) -> None:
    """Drop rows that were computed wrongly, in a new snapshot, so that they can be scored again.

    Earlier snapshots keep the rows until `reflogp store vacuum` deletes them.

    Example: reflogp store drop ./logps --provenance '{"engine": "vllm"}'
    """
    try:
        entries = json.loads(provenance)
    except ValueError as error:
        raise UsageError(f"--provenance is not JSON: {error}") from error
    if not isinstance(entries, dict) or not entries:
        raise UsageError("--provenance must be a JSON object with at least one entry")

    def work(table: LogprobTable) -> tuple[str, list[dict[str, Any]]]:
        with progress_bar(f"reading {table.reference.name}") as bar:
            done = table.drop(provenance=entries, progress=bar.hashed)
        return f"{counted(done.rows, 'row')} dropped; the snapshot is {done.snapshot}", [asdict(done)]

    _each(uri, reference, as_json, "dropped", work)


@app.command("export")
def export(
    uri: options.StoreArgument,
    folder: Annotated[str, typer.Argument(help="New folder to write to.", metavar="FOLDER")],
    reference: ReferenceId = None,
    snapshot: options.SnapshotNumber = None,
    top_k: TopK = 0,
    as_json: options.AsJson = False,
) -> None:
    """Export one reference's log-probs as plain Parquet files with a README, so that you can share them.

    Load the exported folder with `datasets.load_dataset(FOLDER)`.

    Example: reflogp store export ./logps ./logps-to-share
    """
    table = _one_table(uri, reference, top_k)
    with progress_bar(f"exporting {table.reference.name}") as bar:
        rows, files = table.export(folder, snapshot, bar.hashed)
    result = {"reference_id": table.reference.reference_id, "folder": folder, "sequences": rows, "files": files}
    print_result(result, as_json, f"{counted(rows, 'sequence')} in {counted(files, 'file')} written to {folder}")


@app.command("import")
def import_(
    uri: options.StoreArgument,
    folder: Annotated[str, typer.Argument(help="Folder written by `reflogp store export`.", metavar="FOLDER")],
    as_json: options.AsJson = False,
) -> None:
    """Import an exported folder into a store.

    All rows are checked before any row is added. Values already in the store are not replaced.

    Example: reflogp store import ./logps ./logps-to-share
    """
    store = Store(uri)
    with progress_bar("importing") as bar:
        done = import_folder(store, folder, bar.hashed)
    _print_imported(store, done, as_json)


@app.command("push")
def push(
    uri: options.StoreArgument,
    repository: Repository,
    reference: ReferenceId = None,
    snapshot: options.SnapshotNumber = None,
    top_k: TopK = 0,
    public: Annotated[
        bool, typer.Option("--public", help="If the repository is new, make it public. Default: private.")
    ] = False,
    replace: Annotated[
        bool,
        typer.Option(
            "--replace",
            help="Overwrite the repository's log-probs, even if the repository is damaged or contains rows that are not in the "
            "snapshot.",
        ),
    ] = False,
    as_json: options.AsJson = False,
) -> None:
    """Push one reference's log-probs to a dataset repository on the Hugging Face Hub, as plain Parquet with a dataset card.

    If a push is interrupted, run the command again. Files that were already uploaded are not uploaded again.

    Example: reflogp store push ./logps hf://datasets/team/sft-logps
    """
    table = _one_table(uri, reference, top_k)
    with progress_bar(f"exporting {table.reference.name}") as bar:
        at = table.snapshot(snapshot)
        done = push_table(table, repository, at, public=public, replace=replace, progress=bar.hashed)
    line = f"{counted(done.rows, 'sequence')} in {counted(done.files, 'file')} pushed to {repository}, commit {done.commit}"
    if not done.changed:
        sequences = counted(done.rows, "sequence")
        line = f"nothing to push: commit {done.commit} of {repository} already contains the snapshot's {sequences}"
    print_result({"repository": repository, **asdict(done)}, as_json, line)


@app.command("pull")
def pull_(
    uri: options.StoreArgument,
    repository: Repository,
    as_json: options.AsJson = False,
) -> None:
    """Import log-probs into a store from a dataset repository on the Hugging Face Hub.

    All rows are checked before any row is added. Values already in the store are not replaced. If a pull is interrupted, run
    the command again. Files that were already downloaded are not downloaded again.

    Example: reflogp store pull ./logps hf://datasets/team/sft-logps
    """
    store = Store(uri)
    with progress_bar("importing") as bar:
        done = pull(store, repository, bar.hashed)
    _print_imported(store, done, as_json)


def _print_imported(store: Store, done: Imported, as_json: bool) -> None:
    print_result(
        {"store": store.uri, **asdict(done)},
        as_json,
        f"{done.written:,} of {done.rows:,} sequences were new; snapshot {done.snapshot} of reference {done.reference_id} "
        "contains the complete import",
    )
