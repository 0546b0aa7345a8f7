"""Create the store's bucket on the S3 server of the profile `s3` as soon as the server responds.

The bucket's name comes from REFLOGP_STORE (s3://BUCKET/…). The server's address and credentials come from AWS_ENDPOINT_URL,
AWS_REGION, AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY_FILE.
"""

import os
import sys
import time
from pathlib import Path
from urllib.parse import urlsplit

from pyarrow.fs import FileType, S3FileSystem

#: Maximum time in seconds to wait for the server to respond.
PATIENCE = 60


def main() -> None:
    store, endpoint = urlsplit(os.environ["REFLOGP_STORE"]), urlsplit(os.environ["AWS_ENDPOINT_URL"])
    if store.scheme != "s3" or not store.hostname:
        sys.exit(f"REFLOGP_STORE={store.geturl()} names no bucket: use the form s3://BUCKET/FOLDER")
    server = S3FileSystem(
        access_key=os.environ["AWS_ACCESS_KEY_ID"],
        secret_key=Path(os.environ["AWS_SECRET_ACCESS_KEY_FILE"]).read_text().strip(),
        region=os.environ["AWS_REGION"],
        scheme=endpoint.scheme,
        endpoint_override=endpoint.netloc,
        connect_timeout=2,
        allow_bucket_creation=True,
    )
    stop = time.monotonic() + PATIENCE
    while True:
        try:
            there = server.get_file_info(store.hostname).type != FileType.NotFound
            if not there:
                server.create_dir(store.hostname)
        except OSError as error:
            if time.monotonic() > stop:
                sys.exit(f"the bucket {store.hostname} cannot be created at {endpoint.geturl()}: {error}")
            time.sleep(0.5)
        else:
            print(f"bucket {store.hostname}: {'already exists' if there else 'created'}")
            return


if __name__ == "__main__":
    main()
