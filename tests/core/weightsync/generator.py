"""A generator's process: takes one offer after another from its standard input, and answers with the fingerprint of
what it got. `rest` as its argument makes it stop in the middle of the first offer, holding a chunk."""

import base64
import pickle
import sys
import time

from rollstock import fingerprint
from rollstock.manager import make_manager
from rollstock.weightsync.cargo import named
from rollstock.weightsync.receiver import WeightReceiver

name, rank, rests = sys.argv[1], int(sys.argv[2]), "rest" in sys.argv
receiver = WeightReceiver(make_manager().create("transport", {"name": name}), rank, max_resends=1, timeout_s=120.0)
print(receiver.address, flush=True)
for line in sys.stdin:
    arriving = receiver.receive(pickle.loads(base64.b64decode(line)))  # what the executor would bring
    if rests:
        held = next(arriving)
        print("resting", flush=True)
        time.sleep(600)
    print(fingerprint(named(arriving)), flush=True)
