"""Client of the profile `demo`: submit the shipped pairs to the service, then print the first values and the accuracy."""

import os
import sys
import tempfile
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq

from reflogp.cli.demo import shipped_data
from reflogp.cli.jobs import outcome
from reflogp.client import Client


def main() -> None:
    url, reference = os.environ["REFLOGP_URL"], os.environ["REFLOGP_REFERENCE"]
    with Client(url, Path("/secrets/service/token").read_text()) as client, tempfile.TemporaryDirectory() as folder:
        job = client.watch(client.submit(shipped_data(), reference, title="demo").id)
        print(*outcome(job), sep="\n")
        if job.state != "done":
            sys.exit(1)
        values = pq.read_table(client.result(job.id, Path(folder) / "values.parquet"))
    chosen, rejected = (values[f"ref_{side}_logps"].to_numpy() for side in ("chosen", "rejected"))
    print("row  ref_chosen_logps  ref_rejected_logps")
    for row in range(5):
        print(f"{row:3}  {chosen[row]:16.3f}  {rejected[row]:18.3f}")
    print(f"…    {len(chosen)} rows; the reference prefers the chosen answer in {np.mean(chosen > rejected):.0%} of them")


if __name__ == "__main__":
    main()
