"""No worker outlives its parent, however that ends and whatever the worker does."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

SERVED = Path(__file__).parent / "served"

PARENT = """
import sys, threading, time
sys.path.insert(0, sys.argv[1])
import served_functions
from rollstock.sandbox import Sandbox
request = eval(sys.argv[2])
sandbox = Sandbox(served_functions.build, name="reward", limit=600, num_workers=2)
sandbox.start()
threading.Thread(target=lambda: sandbox.map([request] * 2, names=["a", "b"]), daemon=True).start()
time.sleep(0.5)
print(*sandbox.pids, flush=True)
if sys.argv[3] == "exit":
    sys.exit()
time.sleep(600)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="looks processes up in /proc")
@pytest.mark.parametrize("how", ["kill -9", "exit"])
@pytest.mark.parametrize("request_", [("double", 1), ("sleep", 600), ("backtrack",)], ids=["idle", "asleep", "busy"])
def test_workers_end_with_their_parent(how, request_, gone):
    command = [sys.executable, "-c", PARENT, str(SERVED), repr(request_), how]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        pids = [int(word) for word in parent.stdout.readline().split()]
        assert len(pids) == 2
        if how == "kill -9":
            assert all(Path(f"/proc/{pid}").exists() for pid in pids)
            os.kill(parent.pid, signal.SIGKILL)
        parent.wait(timeout=30)
    assert all(gone(pid) for pid in pids)
