"""The processes that tokenize: stopped at once when told to, gone with their parent, replaced when something kills them."""

import os
import signal
import subprocess
import sys
import threading
import time
from itertools import pairwise

import psutil
import pytest

from reflogp.scoring.data.row_process import RowLimits, RowTokenizer
from reflogp.scoring.data.shape import RowError
from tests.conftest import REPOSITORY, save_llama, write_rows
from tests.scoring.hostile_rows import obedient, pair
from tests.service.serving import wait_until

SMALL = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2}


class StopError(Exception):
    pass


def descendants(pid: int) -> list[psutil.Process]:
    try:
        return psutil.Process(pid).children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def test_it_stops_when_told_to_while_a_row_hangs(tokenizer, record_property):
    callbacks = threading.Event()
    asked = []

    def check():
        asked.append(time.monotonic())
        if callbacks.is_set():
            raise StopError

    threading.Timer(0.5, callbacks.set).start()
    before = set(descendants(os.getpid()))
    with pytest.raises(StopError), RowTokenizer(obedient(tokenizer), "preference", RowLimits(seconds=600), check) as rows:
        rows.tokenize([pair("power")])
    longest = max(after - before for before, after in pairwise(asked))
    record_property("told", f"asked every {longest:.2f} s at the longest while a row hangs")
    assert len(asked) >= 3
    assert not set(descendants(os.getpid())) - before


@pytest.mark.slow
def test_a_child_that_is_killed_from_outside_costs_no_row(tokenizer):
    before = set(descendants(os.getpid()))
    killed: list[int] = []
    passes = [0]

    def kill():
        children = set(descendants(os.getpid())) - before
        if children and len(killed) < passes[0]:  # once in a pass: a row whose second try is killed as well is a bad row
            killed.append(children.pop().pid)
            os.kill(killed[-1], signal.SIGKILL)

    with RowTokenizer(obedient(tokenizer), "preference", RowLimits(children=2), kill) as rows:
        for _ in range(3):
            passes[0] += 1
            found = rows.tokenize([pair(f"number {n}") for n in range(300)])
            assert not [example for examples in found for example in examples if isinstance(example, RowError)]
            for child in set(descendants(os.getpid())) - before:  # they wait for the next window
                child.kill()
    assert killed


def test_a_tokenizer_that_stands_still(tokenizer):
    class Sleepy(type(tokenizer)):
        def apply_chat_template(self, conversation, **kwargs):
            if conversation[0]["content"] == "sleep":
                time.sleep(1000)
            return super().apply_chat_template(conversation, **kwargs)

    sleepy = obedient(tokenizer)
    sleepy.__class__ = Sleepy
    with RowTokenizer(sleepy, "preference", RowLimits(seconds=0.5)) as rows:
        first, second = rows.tokenize([pair("sleep"), pair()])
    assert "made no progress" in str(first[0]) and not isinstance(second[0], RowError)


@pytest.mark.slow
def test_children_end_with_a_parent_that_is_killed(tokenizer, tmp_path):
    folder = save_llama(tmp_path / "model", obedient(tokenizer), **SMALL)
    file = write_rows(tmp_path / "rows.jsonl", [pair("power")])
    program = (
        "from reflogp.scoring.data.read import RowSource; from reflogp.scoring.data.row_process import RowLimits;"
        "from reflogp.scoring.data.tokenize import load_tokenizer, tokenize_dataset;"
        f"list(tokenize_dataset(RowSource({str(file)!r}), load_tokenizer({str(folder)!r}), limits=RowLimits(seconds=3)))"
    )
    parent = subprocess.Popen([sys.executable, "-c", program], cwd=REPOSITORY)
    wait_until(lambda: descendants(parent.pid))
    children = descendants(parent.pid)
    parent.kill()
    parent.wait()
    wait_until(lambda: not any(child.is_running() and child.status() != psutil.STATUS_ZOMBIE for child in children), 60)


@pytest.mark.slow
@pytest.mark.parametrize("command", ["score", "report"])
def test_ctrl_c_ends_the_command_line_while_a_row_hangs(command, tokenizer, tmp_path):
    folder = save_llama(tmp_path / "model", obedient(tokenizer), **SMALL)
    file = write_rows(tmp_path / "rows.jsonl", [pair("power") for _ in range(10)])
    arguments = [folder, file, "--store", tmp_path / "store", "--dtype", "float32"]
    if command == "report":
        from reflogp.store import Store, describe_reference

        Store(tmp_path / "store").create_table(describe_reference(str(folder), "float32"))
        arguments += ["-o", tmp_path / "report"]
    program = [sys.executable, "-c", "from reflogp.cli import main; main()", command, *map(str, arguments)]
    process = subprocess.Popen(program, stderr=subprocess.PIPE, text=True, start_new_session=True)
    wait_until(lambda: descendants(process.pid))
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert process.returncode not in (0, None) and "Traceback" not in err, err
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
