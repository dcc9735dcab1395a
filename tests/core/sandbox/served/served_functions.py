"""What the sandbox tests have workers do. Workers import it by name, so its folder is put on the import path."""

import ctypes
import os
import random
import re
import signal
import subprocess
import sys
import time

from rollstock.errors import UserError
from rollstock.sandbox import announce


def build():
    return serve


def serve(request):
    action, *arguments = request
    return globals()[action](*arguments)


def double(x):
    return 2 * x


def nothing():
    return None


def fail(text):
    raise ValueError(text)


def leave():
    sys.exit("bye")


def exit_at_once(code):
    os._exit(code)


def segfault():
    ctypes.string_at(0)


def sleep(seconds):
    time.sleep(seconds)
    return "slept"


def backtrack():
    # Holds the interpreter's lock for longer than any test lasts.
    return re.match(r"(a+)+$", "a" * 60 + "b") is None


def hang_with_children(path, detach):
    """Start a child (in a session of its own, if `detach`), note its process id, and hang."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=detach)
    with open(path, "w") as file:
        file.write(str(child.pid))
    time.sleep(600)


def hang_with_orphan(path):
    """As above, by way of a process that ends at once: the child is an orphan in a session of its own."""
    program = """if True:
        import os, sys, time
        if os.fork():
            sys.exit()
        os.setsid()
        open(sys.argv[1], "w").write(str(os.getpid()))
        time.sleep(600)
    """
    subprocess.run([sys.executable, "-c", program, path], check=True)
    time.sleep(600)


def closure():
    return lambda: 0


class UnreadableResult:
    def __reduce__(self):
        return fail, ("only the worker can read this",)


def unreadable():
    return UnreadableResult()


def huge(size):
    return b"x" * size


def say(text, to="stdout", times=1):
    for _ in range(times):
        getattr(sys, to).write(text)
    return len(text)


def say_on_descriptor(text):
    os.write(1, text.encode())


def close_output():
    os.close(1)
    os.close(2)
    sys.stdout = sys.stderr = None
    return "closed"


def draw():
    return random.random()


def modules():
    return sorted(sys.modules)


def process_id():
    return os.getpid()


def signal_self(number):
    os.kill(os.getpid(), number)
    return "still here"


def terminate_own_child():
    """Exit code of a child that a served function terminates the usual way."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    time.sleep(0.2)
    child.terminate()
    return child.wait(timeout=20)


def import_path():
    return sys.path


def fail_to_build():
    raise RuntimeError("the verifier's tables are missing")


def fail_as_user_error():
    raise UserError("rule: 'exakt' is not a rule. Did you mean 'exact'?")


def hang_while_building():
    time.sleep(600)


def exit_while_building():
    print("libverifier.so: not found", flush=True)
    os._exit(7)


def exit_while_making_something():
    announce("reward 'mine' (file: judge.py)")
    exit_while_building()


def crash_while_making_something():
    announce("reward 'mine' (file: judge.py)")
    os.kill(os.getpid(), signal.SIGKILL)


def refuse_something():
    announce("reward 'mine' (file: judge.py)")
    fail_as_user_error()


def build_scorer_and_list_modules():
    """The rewards of a config as a reward process builds them; a call then lists what was imported for them."""
    from rollstock.scoring import make_scorer

    make_scorer({"name": "arithmetic"}, [{"name": "environment"}, {"name": "rule"}], [], 0)
    return serve
