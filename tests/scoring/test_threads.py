"""How many threads compute: a second group of them would have each operation on a CPU wait for sleepers."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from reflogp.scoring.torch_engine.device import run_in_own_thread

THREADS_OF_A_LOAD = """
import json, os, sys, threading, time
from reflogp.scoring.torch_engine import Sequence
from reflogp.scoring.engines import EngineChoice
from reflogp.store import describe_reference
import torch

def tasks():
    return set(os.listdir("/proc/self/task")) - {str(thread.native_id) for thread in threading.enumerate()}

model = sys.argv[1]
reference = describe_reference(model, "float32")
before = tasks()
engine = EngineChoice(device="cpu").make(model, reference)
stop = time.monotonic() + 10
while (loaded := len(tasks() - before)) and time.monotonic() < stop:
    time.sleep(0.01)  # threads that end are there for a moment
engine.score([Sequence([1, 2, 3], [4, 5])])
computed = len(tasks() - before)
print(json.dumps({"threads": torch.get_num_threads(), "loaded": loaded, "computed": computed}))
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/task").is_dir(), reason="reads the threads of a process from /proc")
def test_a_load_leaves_no_group_of_threads_behind(reference_folder):
    command = [sys.executable, "-c", THREADS_OF_A_LOAD, str(reference_folder)]
    environment = {**os.environ, "OMP_NUM_THREADS": "2", "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=True, timeout=300)
    seen = json.loads(done.stdout.splitlines()[-1])
    assert seen["threads"] == 2
    assert seen["loaded"] == 0
    assert seen["computed"] >= 1, "computing in this thread makes its group, so that the count above could have found one"


def test_what_is_raised_in_the_thread_is_raised_here():
    def fail():
        raise MemoryError("no room")

    with pytest.raises(MemoryError, match="no room"):
        run_in_own_thread(fail)
