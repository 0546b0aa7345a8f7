import pytest

from reflogp.store import Store
from tests.store.rows import REFERENCE


@pytest.fixture
def table(tmp_path):
    return Store(tmp_path / "store").create_table(REFERENCE)
