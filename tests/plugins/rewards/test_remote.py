"""Rewards from a real server on this machine: one that answers, fails, talks nonsense, drips, or says nothing."""

import json
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from rollstock import ConfigError, Sample, Task
from rollstock.plugins.environments.arithmetic import Arithmetic
from rollstock.plugins.rewards.remote import Remote, RemoteConfig
from rollstock.roles.reward import RewardWorker
from rollstock.testing import check_reward

Answer = Callable[[BaseHTTPRequestHandler, dict[str, Any]], None]


def reply(handler: BaseHTTPRequestHandler, body: bytes, status: int = 200, **headers: str) -> None:
    handler.send_response(status)
    for name, value in {"Content-Length": str(len(body)), **headers}.items():
        handler.send_header(name, value)
    handler.end_headers()
    handler.wfile.write(body)


def right(handler: BaseHTTPRequestHandler, asked: dict[str, Any]) -> None:
    reply(handler, json.dumps({"score": float(asked["response"] == asked["answer"])}).encode())


@dataclass
class Server:
    """What answers, in turn (the last one from then on), and what was asked."""

    url: str = ""
    answers: list[Answer] = field(default_factory=lambda: [right])
    asked: list[dict[str, Any]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    ended: threading.Event = field(default_factory=threading.Event)

    def reward(self, **options: Any) -> Remote:
        given = {"url": self.url, "timeout_s": 5.0, "backoff_s": 0.001, **options}
        made = Remote(RemoteConfig(**given))
        made.setup(Arithmetic())
        return made


@pytest.fixture
def server() -> Iterator[Server]:
    found = Server()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            answer = found.answers[min(len(found.asked), len(found.answers) - 1)]
            found.asked.append(asked)
            found.headers.append(dict(self.headers))
            answer(self, asked)

        def log_message(self, *_: Any) -> None:
            return

    http = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    http.daemon_threads = False  # so that closing waits for them
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    found.url = f"http://127.0.0.1:{http.server_port}/score"
    yield found
    found.ended.set()
    http.shutdown()
    thread.join()
    http.server_close()


SAMPLE = Sample(task=Task(id="t", prompt="3+4=", answer="7", metadata={"level": 1}), response="7", num_tokens=2)


def status(code: int) -> Answer:
    return lambda handler, asked: reply(handler, b"no", code)


def nonsense(handler: BaseHTTPRequestHandler, asked: dict[str, Any]) -> None:
    reply(handler, b"<html>\x00")


def no_number(handler: BaseHTTPRequestHandler, asked: dict[str, Any]) -> None:
    reply(handler, b'{"score": "high"}')


def not_a_number(handler: BaseHTTPRequestHandler, asked: dict[str, Any]) -> None:
    reply(handler, b'{"score": NaN}')


def beyond_all(handler: BaseHTTPRequestHandler, asked: dict[str, Any]) -> None:
    reply(handler, b'{"score": 1%s}' % (b"0" * 400))


def hangs_up(handler: BaseHTTPRequestHandler, asked: dict[str, Any]) -> None:
    handler.close_connection = True


def too_short(handler: BaseHTTPRequestHandler, asked: dict[str, Any]) -> None:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"sco')
    handler.close_connection = True


def test_a_server_that_answers_is_believed(server: Server) -> None:
    assert server.reward().score(SAMPLE) == 1.0
    assert server.asked == [
        {
            "task_id": "t",
            "prompt": "3+4=",
            "answer": "7",
            "metadata": {"level": 1},
            "response": "7",
            "turns": [],
            "num_tokens": 2,
            "finish_reason": "stop",
            "state": {},
        }
    ]
    server.answers = [lambda handler, asked: reply(handler, b'{"result": {"value": null}}')]
    assert server.reward(field="result.value").score(SAMPLE) is None


def test_it_passes_the_kit(server: Server) -> None:
    assert check_reward("remote", options={"url": server.url}).passed


@pytest.mark.parametrize("fault", [status(500), status(503), status(429), nonsense, no_number, hangs_up, too_short])
def test_a_fault_that_passes_costs_a_retry(server: Server, fault: Answer) -> None:
    server.answers = [fault, fault, right]
    assert server.reward().score(SAMPLE) == 1.0
    assert len(server.asked) == 3


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        (status(500), r"answered 500 Internal Server Error, in each of 3 attempts"),
        (nonsense, r"without a number at `score`: b'<html>\\x00'"),
        (not_a_number, r"sent 'nan' at `score`, which is no finite number"),
        (beyond_all, r"sent '1000.*' at `score`, which is no finite number"),
        (no_number, r"sent 'high' at `score`, which is no number"),
        (hangs_up, r"cannot be reached \(RemoteDisconnected"),
    ],
)
def test_a_fault_that_stays_is_an_error_or_an_abstention(server: Server, fault: Answer, told: str) -> None:
    server.answers = [fault]
    with pytest.raises(RuntimeError, match=told):
        server.reward().score(SAMPLE)
    assert server.reward(on_failure="abstain").score(SAMPLE) is None
    assert len(server.asked) == 6


def test_a_server_that_says_nothing_is_left_after_the_limit(server: Server) -> None:
    server.answers = [lambda handler, asked: server.ended.wait() and None]
    with pytest.raises(RuntimeError, match=r"did not answer within 0\.1 s, in each of 2 attempts"):
        server.reward(timeout_s=0.1, max_retries=1).score(SAMPLE)


def test_a_server_that_drips_is_left_after_the_limit(server: Server) -> None:
    def drip(handler: BaseHTTPRequestHandler, asked: dict[str, Any]) -> None:
        handler.send_response(200)
        handler.end_headers()
        while not server.ended.wait(0.02):
            try:
                handler.wfile.write(b" ")
            except OSError:
                return

    server.answers = [drip]
    began = time.monotonic()
    with pytest.raises(RuntimeError, match="did not answer within 0.3 s"):
        server.reward(timeout_s=0.3, max_retries=0).score(SAMPLE)
    assert time.monotonic() - began < 60  # it would drip for ever


def test_a_reply_without_end_is_not_kept(server: Server) -> None:
    server.answers = [lambda handler, asked: reply(handler, b" " * (2 << 20))]
    with pytest.raises(RuntimeError, match="sent more than 1048576 bytes"):
        server.reward(max_retries=0).score(SAMPLE)


def test_a_sample_that_is_refused_is_not_sent_again(server: Server) -> None:
    server.answers = [status(422)]
    with pytest.raises(ValueError, match="refused the sample: 422"):
        server.reward(on_failure="abstain").score(SAMPLE)
    assert len(server.asked) == 1


def test_a_server_cannot_send_samples_elsewhere(server: Server) -> None:
    server.answers = [lambda handler, asked: reply(handler, b"", 307, Location=server.url + "/elsewhere"), right]
    with pytest.raises(ValueError, match="refused the sample: 307"):
        server.reward().score(SAMPLE)
    assert len(server.asked) == 1


def test_nobody_there_is_a_failed_attempt(server: Server) -> None:
    with pytest.raises(RuntimeError, match=r"cannot be reached \(ConnectionRefusedError"):
        server.reward(url="http://127.0.0.1:1/", max_retries=0).score(SAMPLE)


def test_the_token_comes_from_the_environment(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADER_TOKEN", "abc")
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")  # which has nothing to do with a server on this machine
    server.reward(token_variable="GRADER_TOKEN").score(SAMPLE)
    assert server.headers[0]["Authorization"] == "Bearer abc"
    for value in ("", "a\nb: c"):
        monkeypatch.setenv("GRADER_TOKEN", value)
        with pytest.raises(ConfigError, match="no token of plain characters in 'GRADER_TOKEN'"):
            server.reward(token_variable="GRADER_TOKEN")


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("file:///etc/passwd", "is no address of the form"),
        ("http://", "is no address of the form"),
        ("http://grader.example/score", "sends samples to grader.example without encryption"),
        ("http://10.0.0.1:8000", "sends samples to 10.0.0.1 without encryption"),
        ("http://127.0.0.1:99999/score", "is no address of the form"),
        ("http://127.0.0.1:0/score", "is no address of the form"),
        ("http://127.0.0.1/my score", "is no address of the form"),
        ("http://[::1/score", "is no address of the form"),
        ("https://me:secret@grader.example:port", "is no address of the form"),
        ("https://me:secret@grader.example", "has a password in it"),
    ],
)
def test_addresses_that_will_not_do_are_refused(url: str, message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        RemoteConfig(url=url)
    assert "secret" not in str(caught.value)


@pytest.mark.parametrize("field", ["", "result.", ".value"])
def test_a_field_that_names_no_place_is_refused(field: str) -> None:
    with pytest.raises(ValueError, match="names no place in a reply"):
        RemoteConfig(url="http://localhost", field=field)


def test_addresses_that_will_do() -> None:
    for url in ("https://grader.example/score", "http://localhost:8000", "http://[::1]:8000", "http://127.0.0.2"):
        assert RemoteConfig(url=url).url == url
    assert RemoteConfig(url="http://10.0.0.1", allow_http=True).allow_http


def test_in_a_reward_process_a_failing_server_costs_only_its_samples(server: Server, caplog: Any) -> None:
    server.answers = [
        lambda handler, asked: reply(handler, b"no", 500) if asked["response"] == "8" else right(handler, asked)
    ]
    options = {"name": "remote", "url": server.url, "backoff_s": 0.001}
    worker = RewardWorker(
        environment={"name": "arithmetic"}, rewards=[options], blocked=[], seed=0, timeout_s=30.0, num_processes=1
    )
    try:
        samples = [Sample(task=SAMPLE.task, response=text) for text in ("7", "8", "9")]
        scores = worker.score(samples, 1)
    finally:
        worker.close()
    assert scores.totals == [1.0, None, 0.0]
    assert scores.metrics["reward/num_raised"].value == 1
    assert "answered 500 Internal Server Error, in each of 3 attempts" in caplog.text
