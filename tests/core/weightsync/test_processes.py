"""Weights reach real processes, version after version, and one that is killed in the middle stops nobody else."""

import base64
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from rollstock import fingerprint
from rollstock.manager import make_manager
from rollstock.weightsync.cargo import Cargo
from rollstock.weightsync.sender import Offer, WeightSender

from .conftest import CHUNK

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="the transport is for Linux")


class Generator:
    def __init__(self, rank: int, *arguments: str) -> None:
        command = [sys.executable, str(Path(__file__).with_name("generator.py")), "shm", str(rank), *arguments]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def answer(self) -> str:
        assert self.process.stdout is not None
        return self.process.stdout.readline().strip()

    def tell(self, offer: Offer) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(base64.b64encode(pickle.dumps(offer)).decode() + "\n")
        self.process.stdin.flush()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


def test_a_receiver_that_is_killed_in_the_middle_stops_nobody_and_versions_follow(cargo: Cargo) -> None:
    names = set(os.listdir("/dev/shm"))
    transport: Any = make_manager().create("transport", {"name": "shm"})
    sender = WeightSender(transport, CHUNK)
    generators = [Generator(0), Generator(1, "rest")]
    try:
        inboxes = [generator.answer() for generator in generators]
        offer = sender.offer(cargo, 1, inboxes)
        for generator in generators:
            generator.tell(offer)
        assert generators[1].answer() == "resting"
        generators[1].kill()
        assert generators[0].answer() == fingerprint(cargo.weights)
        sender.finish()
        for version in range(2, 5):
            for _, tensor in cargo.weights[:3]:
                tensor.mul_(1.5)
            generators[0].tell(sender.offer(cargo, version, inboxes[:1]))
            assert generators[0].answer() == fingerprint(cargo.weights)
            assert sender.finish()["sync/num_resent"].value == 0
        transport._hear_releases()
        assert not [name for name in set(os.listdir("/dev/shm")) - names if "rollstock" in name]
    finally:
        for generator in generators:
            generator.kill()
        sender.close()
