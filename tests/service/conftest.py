"""A folder for a file of tests, a client of its service, and a service of a test's own."""

import pytest

from reflogp.client import Client
from tests.service.serving import float32, running, settings_file


@pytest.fixture(scope="module")
def place(tmp_path_factory):
    return tmp_path_factory.mktemp("place")


@pytest.fixture
def client(service):
    with Client(service.url) as found:
        yield found


@pytest.fixture
def serve(tmp_path, reference_folder, warm_python):
    """serve(model, **settings) -> a service of it, named `ref`, for the time of a `with` block; again, it goes on."""

    def start(model=reference_folder, **settings):
        models = {"ref": {**float32(model), "trust_remote_code": model != reference_folder}}
        file = settings_file(tmp_path, tmp_path / "store", models, **settings)
        return running("--config", file, warm=warm_python)

    return start
