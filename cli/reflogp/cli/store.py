"""`reflogp store`: inspect, verify, compact and share a store, and drop rows from it."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import asdict
from typing import Annotated, Any, TypeVar

import typer

from reflogp.cli.console import EXIT_FAILED, err, out, print_json, progress_bar
from reflogp.store import LogprobTable, ReflogpError, Store, UsageError, import_folder
from reflogp.store.exchange import Imported
from reflogp.store.hub import pull, push_table
from reflogp.store.maintenance import RETENTION_HOURS
from reflogp.store.storage import PLACES
from reflogp.store.texts import counted

T = TypeVar("T")

app = typer.Typer(no_args_is_help=True, help="Inspect, verify, compact and share a store of log-probs, and drop rows from it.")

Uri = Annotated[str, typer.Argument(help=f"Store: {PLACES}.", metavar="URI")]
ReferenceId = Annotated[
    str | None,
    typer.Option(
        "--reference",
        help="Id of one reference, or the first characters of its id. Default: all references or, for export and push, the "
        "store's only reference.",
        metavar="ID",
    ),
]
AsJson = Annotated[bool, typer.Option("--json", help="Print the result, or the error, as one JSON object on the last line.")]


@app.command("ls")
def ls(uri: Uri, as_json: AsJson = False) -> None:
    """List a store's reference models: id, name, dtype, latest snapshot, number of sequences and shards, and size."""
    store = Store(uri)
    tables = _Tables(store, None)
    found = tables.each(_described)
    if as_json:
        print_json({"store": store.uri, "references": found, "failed": tables.failed})
    elif not tables.references:
        out.print(f"{store.uri} contains no references yet")
    else:
        for entry in found:
            out.print(
                f"{entry['reference_id']}  {entry['name']} in {entry['dtype']}: snapshot {entry['snapshot']}, "
                f"{counted(entry['sequences'], 'sequence')}, {counted(entry['shards'], 'shard')}, {_size(entry['bytes'])}"
            )
    tables.exit_if_failed()


def _described(table: LogprobTable) -> dict[str, Any]:
    shards, rows, size = table.totals()
    return {
        "reference_id": table.reference.reference_id,
        "name": table.reference.name,
        "dtype": table.reference.dtype,
        "snapshot": table.snapshot_number(),
        "shards": shards,
        "sequences": rows,
        "bytes": size,
    }


@app.command("verify")
def verify_(
    uri: Uri,
    reference: ReferenceId = None,
    with_repair: Annotated[
        bool,
        typer.Option(
            "--repair",
            help="Drop damaged shards with all their rows, in a new snapshot.",
        ),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Read every page of every shard, verify checksums and rows, and list damaged shards.

    This command needs no model; `reflogp verify` checks that values are the model's, by computing some of them again.

    The exit code is 1 if there is damage and --repair was not given. After a repair, the next `reflogp score` with the same
    data scores the rows of the dropped shards again.
    """
    store = Store(uri)
    tables = _Tables(store, reference)

    def check(table: LogprobTable) -> list[dict[str, Any]]:
        name = table.reference.reference_id
        with progress_bar(f"verifying {table.reference.name}") as bar:
            found = table.verify(bar.hashed)
        for damage in found:
            err.print(f"damaged: {table.uri}/{damage.file} ({damage.rows:,} rows): {damage.problem}", style="red")
        if found and with_repair:
            done = table.drop(shards=[damage.file for damage in found])
            err.print(
                f"repaired {name}: snapshot {done.snapshot} has {counted(table.totals()[1], 'row')}; run `reflogp score` to "
                "score the dropped rows again"
            )
        return [{"reference_id": name, **asdict(damage), "file": f"{table.uri}/{damage.file}"} for damage in found]

    damaged = [damage for found in tables.each(check) for damage in found]
    repaired = with_repair and bool(damaged)
    if as_json:
        print_json({"store": store.uri, "damaged": damaged, "repaired": repaired, "failed": tables.failed})
    elif not damaged and not tables.failed:
        out.print(f"{store.uri}: every shard is intact")
    if damaged and not repaired:
        err.print("--repair drops the damaged shards; the next `reflogp score` scores their rows again")
        raise typer.Exit(EXIT_FAILED)
    tables.exit_if_failed()


@app.command("compact")
def compact_(uri: Uri, reference: ReferenceId = None, as_json: AsJson = False) -> None:
    """Merge shards into larger shards, and keep only one row for each key.

    Other processes may use the store during the compaction. Scoring automatically merges small shards; this command merges
    shards of all sizes. The replaced shards remain until `reflogp store vacuum` deletes them.
    """
    store = Store(uri)
    tables = _Tables(store, reference)

    def work(table: LogprobTable) -> dict[str, Any]:
        with progress_bar(f"compacting {table.reference.name}") as bar:
            done = table.compact(progress=bar.hashed)
        result = f"{done.shards_before} -> {done.shards_after} shards, {done.rows:,} rows rewritten"
        if not done.won:
            result = "another process has already compacted the same shards"
        if not as_json:
            out.print(f"{table.reference.reference_id}: {result}")
        return {"reference_id": table.reference.reference_id, **asdict(done)}

    results = tables.each(work)
    if as_json:
        print_json({"store": store.uri, "compacted": results, "failed": tables.failed})
    tables.exit_if_failed()


@app.command("vacuum")
def vacuum_(
    uri: Uri,
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
    as_json: AsJson = False,
) -> None:
    """Delete shards that compaction has replaced, and files of crashed writers, after a retention period.

    The period starts when a shard is replaced or a file is written. A snapshot that needs a deleted shard can no longer be
    read: reading the snapshot fails with an error that explains why.
    """
    store = Store(uri)
    tables = _Tables(store, reference)

    def work(table: LogprobTable) -> tuple[str, list[str]]:
        files = table.vacuum(retention_hours, dry_run=dry_run, alone=alone)
        if not as_json:
            out.print(f"{table.reference.reference_id}: {counted(len(files), 'file')} {'would be ' if dry_run else ''}deleted")
        return table.reference.reference_id, files

    deleted = dict(tables.each(work))
    if as_json:
        print_json({"store": store.uri, "dry_run": dry_run, "deleted": deleted, "failed": tables.failed})
    tables.exit_if_failed()


@app.command("drop")
def drop(
    uri: Uri,
    provenance: Annotated[
        str,
        typer.Option(
            help='Entries of the provenance of the rows to drop, as JSON, such as \'{"engine": "vllm"}\'. The rows of an '
            "export have their provenance in the column `provenance`.",
            metavar="JSON",
        ),
    ],
    reference: ReferenceId = None,
    as_json: AsJson = False,
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
    store = Store(uri)
    tables = _Tables(store, reference)

    def work(table: LogprobTable) -> dict[str, Any]:
        with progress_bar(f"reading {table.reference.name}") as bar:
            done = table.drop(provenance=entries, progress=bar.hashed)
        if not as_json:
            out.print(f"{table.reference.reference_id}: {counted(done.rows, 'row')} dropped; the snapshot is {done.snapshot}")
        return {"reference_id": table.reference.reference_id, **asdict(done)}

    results = tables.each(work)
    if as_json:
        print_json({"store": store.uri, "dropped": results, "failed": tables.failed})
    tables.exit_if_failed()


@app.command("export")
def export(
    uri: Uri,
    folder: Annotated[str, typer.Argument(help="New folder to write to.", metavar="FOLDER")],
    reference: ReferenceId = None,
    snapshot: Annotated[int | None, typer.Option(help="Number of the snapshot to export. Default: the latest.")] = None,
    as_json: AsJson = False,
) -> None:
    """Export one reference's log-probs as plain Parquet files with a README, so that you can share them.

    Load the exported folder with `datasets.load_dataset(FOLDER)`.

    Example: reflogp store export ./logps ./logps-to-share
    """
    table = _Tables(Store(uri), reference).only("an export")
    with progress_bar(f"exporting {table.reference.name}") as bar:
        rows, files = table.export(folder, snapshot, bar.hashed)
    if as_json:
        print_json({"reference_id": table.reference.reference_id, "folder": folder, "sequences": rows, "files": files})
    else:
        out.print(f"{counted(rows, 'sequence')} in {counted(files, 'file')} written to {folder}")


@app.command("import")
def import_(
    uri: Uri,
    folder: Annotated[str, typer.Argument(help="Folder written by `reflogp store export`.", metavar="FOLDER")],
    as_json: AsJson = False,
) -> None:
    """Import an exported folder into a store.

    All rows are checked before any row is added. Values already in the store are not replaced.
    """
    store = Store(uri)
    with progress_bar("importing") as bar:
        done = import_folder(store, folder, bar.hashed)
    _print_imported(store, done, as_json)


@app.command("push")
def push(
    uri: Uri,
    repository: Annotated[
        str, typer.Argument(help="Dataset repository: hf://datasets/ORGANISATION/NAME.", metavar="REPOSITORY")
    ],
    reference: ReferenceId = None,
    snapshot: Annotated[int | None, typer.Option(help="Number of the snapshot to push. Default: the latest.")] = None,
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
    as_json: AsJson = False,
) -> None:
    """Push one reference's log-probs to a dataset repository on the Hugging Face Hub, as plain Parquet with a dataset card.

    If a push is interrupted, run the command again. Files that were already uploaded are not uploaded again.

    Example: reflogp store push ./logps hf://datasets/team/sft-logps
    """
    table = _Tables(Store(uri), reference).only("a repository")
    with progress_bar(f"exporting {table.reference.name}") as bar:
        at = table.snapshot(snapshot)
        done = push_table(table, repository, at, public=public, replace=replace, progress=bar.hashed)
    if as_json:
        print_json({"repository": repository, **asdict(done)})
    elif done.changed:
        pushed = f"{counted(done.rows, 'sequence')} in {counted(done.files, 'file')}"
        out.print(f"{pushed} pushed to {repository}, commit {done.commit}")
    else:
        sequences = counted(done.rows, "sequence")
        out.print(f"nothing to push: commit {done.commit} of {repository} already contains the snapshot's {sequences}")


@app.command("pull")
def pull_(
    uri: Uri,
    repository: Annotated[
        str, typer.Argument(help="Dataset repository: hf://datasets/ORGANISATION/NAME[@REVISION].", metavar="REPOSITORY")
    ],
    as_json: AsJson = False,
) -> None:
    """Import log-probs into a store from a dataset repository on the Hugging Face Hub.

    The files' digests and all rows are checked before any row is added. Values already in the store are not replaced. If a pull
    is interrupted, run the command again. Files that were already downloaded are not downloaded again.

    Example: reflogp store pull ./logps hf://datasets/team/sft-logps
    """
    store = Store(uri)
    with progress_bar("importing") as bar:
        done = pull(store, repository, bar.hashed)
    _print_imported(store, done, as_json)


def _print_imported(store: Store, done: Imported, as_json: bool) -> None:
    if as_json:
        print_json({"store": store.uri, **asdict(done)})
    else:
        out.print(
            f"{done.written:,} of {done.rows:,} sequences were new; snapshot {done.snapshot} of reference {done.reference_id} "
            "contains the complete import"
        )


def _size(count: int) -> str:
    return f"{count / 1e6:,.1f} MB" if count >= 1e5 else f"{count / 1e3:,.1f} kB"


class _Tables:
    """The tables of all references in a store, or of a single reference.

    Args:
        store: the store that contains the tables.
        reference: id of the single reference or the beginning of its id, or None for all references.

    Attributes:
        references: the references that the tables belong to.
        failed: dict from reference id to error message, for each table for which `each` printed an error and continued.

    Raises UsageError if `reference` is given, but is not the beginning of exactly one id.
    """

    def __init__(self, store: Store, reference: str | None) -> None:
        references = store.references()
        self._store = store
        self.references = [r for r in references if reference is None or r.reference_id.startswith(reference)]
        self.failed: dict[str, str] = {}
        if reference is not None and len(self.references) != 1:
            there = ", ".join(f"{r.reference_id} ({r.name}, {r.dtype})" for r in references) or "none"
            raise UsageError(
                f"--reference {reference} must be the beginning of exactly one reference id, but is the beginning of "
                f"{len(self.references)} ids in {store.uri}; the store has: {there}"
            )

    def only(self, holder: str) -> LogprobTable:
        """Return the table of the only reference.

        Args:
            holder: what the caller wants to write, such as "an export". The error message starts with this text.

        Raises UsageError unless there is exactly one reference.
        """
        if not self.references:
            raise UsageError(f"{holder} must contain exactly one reference, but the store {self._store.uri} has none")
        if len(self.references) != 1:
            names = ", ".join(f"{r.reference_id} ({r.name}, {r.dtype})" for r in self.references)
            raise UsageError(
                f"{holder} must contain exactly one reference; choose one with --reference. The store has: {names}"
            )
        return self._store[self.references[0].reference_id]

    def each(self, work: Callable[[LogprobTable], T]) -> list[T]:
        """Call `work` for every table and return the results.

        If `work` fails for one of several tables, print the error and continue with the next table. If there is only one table,
        raise the error.
        """
        done = []
        for reference in self.references:
            try:
                done.append(work(self._store[reference.reference_id]))
            except ReflogpError as error:
                if len(self.references) == 1:
                    raise
                err.print(f"reflogp: {reference.reference_id}: {error}", style="red")
                self.failed[reference.reference_id] = str(error)
        return done

    def exit_if_failed(self) -> None:
        if self.failed:
            raise typer.Exit(EXIT_FAILED)
