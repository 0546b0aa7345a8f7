"""Write the report of a job that is done: the page of `reflogp report`, about the job's dataset and its stored values."""

from __future__ import annotations

import logging
import os
import socket
import threading

from reflogp.scoring.frames import encode
from reflogp.scoring.reports.build import make_page
from reflogp.scoring.reports.collect import collect
from reflogp.service.log_lines import set_up_process
from reflogp.service.runner.job import open_dataset
from reflogp.service.runner.job_dataset import delete_oldest
from reflogp.service.runner.order import JobOrder
from reflogp.store import ReflogpError, Store, StoreUnavailableError
from reflogp.store.files import write_atomically
from reflogp.store.texts import shortened_without_secrets
from reflogp.store.windows import TrainerSettings

logger = logging.getLogger("reflogp.runner")


def main(connection: socket.socket, order: JobOrder) -> None:
    """Write a job's report in this process, and exit.

    If there is an error, send its text over the connection, and whether it would be the same again.
    """
    set_up_process()
    threading.Thread(target=_exit_with_the_service, args=(connection,), daemon=True).start()
    try:
        _write(order)
    except Exception as error:
        is_lasting = isinstance(error, ReflogpError | FileNotFoundError) and not isinstance(error, StoreUnavailableError)
        logger.warning("the report could not be written: %s", error, exc_info=not is_lasting, extra={"job": order.claim.id})
        text = shortened_without_secrets(str(error) or type(error).__name__)
        connection.sendall(encode({"error": text, "is_lasting": is_lasting}))
    os._exit(0)


def _write(order: JobOrder) -> None:
    snapshot, asked = Store(order.context.store)[order.reference.reference_id].snapshot(), order.claim.settings
    settings = TrainerSettings(asked.max_length, asked.truncation_mode)  # the report shows plain sums, without ld_alpha
    with open_dataset(order, lambda: None) as (dataset, tokenizer):
        collected, data = collect(dataset, "the dataset", snapshot, settings), order.claim.source["name"]
        page = make_page(
            collected, dataset.only, tokenizer.load(), snapshot, settings, score="", data=data, model=asked.reference
        )
    delete_oldest(order.context.tokens, order.context.max_tokens_bytes)
    with write_atomically(order.context.report(order.claim.id)) as partial:
        partial.write_bytes(page)


def _exit_with_the_service(connection: socket.socket) -> None:
    connection.recv(1)  # the service sends nothing, so this returns when it has exited
    os._exit(1)
