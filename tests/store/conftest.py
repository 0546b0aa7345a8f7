import pytest

from reflogp.store import LogprobStore
from tests.store.rows import REFERENCE


@pytest.fixture
def table(tmp_path):
    return LogprobStore(tmp_path / "store").create_table(REFERENCE)
