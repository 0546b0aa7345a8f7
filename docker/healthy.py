"""Health check of the image: exit with code 0 if the service is ready. Otherwise, print the reason and exit with code 1."""

import os
import sys
import urllib.error
import urllib.request

try:
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    opener.open(f"http://127.0.0.1:{os.environ['REFLOGP_PORT']}/readyz", timeout=8).close()
except urllib.error.HTTPError as error:
    sys.exit(f"{error.code}: {error.read(2000).decode(errors='replace')}")
except OSError as error:
    sys.exit(f"the service does not respond: {error}")
