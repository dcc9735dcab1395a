"""Starts real processes that train together, for the tests beside it: `python workers.py FOLDER`.

The folder's `jobs.json` says, for each job, which function of `jobs` it calls, with what, in how many processes. One
program imports torch once and forks them, because an import takes longer than most jobs. What process 0 returns is kept
in `<job>.pt`, what any raises in `<job>.error`.
"""

import gc
import json
import os
import socket
import sys
import traceback
from pathlib import Path
from typing import Any

import torch


def main(folder: Path) -> None:
    """Do all jobs, each with processes of its own, one after the other."""
    torch.set_num_threads(1)
    sys.path.insert(0, str(Path(__file__).parent))
    import jobs

    jobs.warm(folder)
    gc.collect()
    gc.freeze()  # what is there stays: every collection in a child would look at it again
    for job in json.loads((folder / "jobs.json").read_text()):
        children = start(folder, job, getattr(jobs, job["call"]))
        codes = [os.waitpid(child, 0)[1] for child in children]
        if any(codes) and not list(folder.glob(f"{job['name']}.error*")):
            (folder / f"{job['name']}.error").write_text(f"processes died without a word: {codes}")


def start(folder: Path, job: dict[str, Any], call: Any) -> list[int]:
    """Fork the processes of a job; returns their ids."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(probe.getsockname()[1]))
    children = []
    for rank in range(job["count"]):
        child = os.fork()
        if child == 0:
            os._exit(run(folder, job, call, rank))
        children.append(child)
    return children


def run(folder: Path, job: dict[str, Any], call: Any, rank: int) -> int:
    """One process of a job; returns its exit code."""
    try:
        found = call(rank=rank, world_size=job["count"], folder=folder, **job.get("with", {}))
        if rank == 0:
            torch.save(found, folder / f"{job['name']}.pt")
        return 0
    except BaseException:
        (folder / f"{job['name']}.error{rank}").write_text(traceback.format_exc())
        return 1
    finally:
        sys.stdout.flush()
        sys.stderr.flush()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
