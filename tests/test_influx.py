"""The real InfluxDB takes our lines, and what goes wrong on the way to it loses nothing that it need not."""

from __future__ import annotations

import http.server
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from builders import GIB, a_claim_record, a_device, a_snapshot
from exporters import an_influxdb, free_port
from nodes import Gpuguard, eventually, start
from test_metrics import FULL, facts_about

from gpuguard.errors import GpuguardError, InvalidRequest
from gpuguard.metrics.families import metric_families
from gpuguard.metrics.influx import MAX_BATCHES, InfluxClient, to_influx

HOSTILE = 'eve, x=1\\ "q" 张\n\\'


class Web:
    """A server that answers *status* and keeps what it got."""

    def __init__(self) -> None:
        self.status, self.headers, self.got = 204, {}, []
        web = self

        class Answer(http.server.BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                web.got.append((self.path, dict(self.headers), body.decode()))
                self.send_response(web.status)
                for name, value in web.headers.items():
                    self.send_header(name, value)
                self.end_headers()
                self.wfile.write(b"{}" if web.status != 204 else b"")

            def do_GET(self) -> None:
                web.got.append((self.path, dict(self.headers), ""))
                self.send_response(200)
                self.end_headers()

            def log_message(self, *_: object) -> None:
                pass

        self.server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answer)
        self.url = f"http://127.0.0.1:{self.server.server_port}/write?db=gpuguard"


@contextmanager
def a_web() -> Iterator[Web]:
    web = Web()
    thread = threading.Thread(target=web.server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield web
    finally:
        web.server.shutdown()
        thread.join()
        web.server.server_close()


def test_influxdb_answers_with_our_numbers(tmp_path):
    device = a_device(memory_used=10 * GIB, **FULL)
    snapshot = a_snapshot(device, claims=(a_claim_record(device, user=HOSTILE),))
    with an_influxdb(tmp_path) as influx:
        InfluxClient(influx.url).send(
            to_influx(metric_families(facts_about(snapshot)), "node 1,x=\\", snapshot.taken_at)
        )

        (one,) = influx.query("SELECT memory_used_bytes, temperature_celsius FROM gpuguard_device WHERE uuid != ''")[:1]
        assert (one["memory_used_bytes"], one["temperature_celsius"]) == (10 * GIB, 35)
        users = influx.query("SELECT claimed_devices FROM gpuguard_user GROUP BY *")
        assert [(each["claimed_devices"], each["user"], each["host"]) for each in users] == [
            (1, 'eve, x=1\\ "q" 张\\n/', "node 1,x=/")
        ]
        names = {each["name"] for each in influx.query("SHOW MEASUREMENTS")}
        assert names == {"gpuguard", "gpuguard_device", "gpuguard_user"}


def test_the_command_sends_again_and_again(tmp_path):
    start(str(tmp_path / "node"), "2xH100-80GB")
    with an_influxdb(tmp_path) as influx:
        process = Gpuguard(tmp_path, None).start("metrics", "--influx", influx.url, "--every", "1s")
        try:
            question = "SELECT COUNT(temperature_celsius) FROM gpuguard_device"
            assert eventually(lambda: any(row["count"] >= 4 for row in influx.query(question)), 30)
        finally:
            process.terminate()
            _, said = process.communicate(timeout=20)
    assert (process.returncode, said) == (0, "")


def test_influxdb_refuses_what_is_no_line(tmp_path):
    with an_influxdb(tmp_path) as influx, pytest.raises(GpuguardError, match="refuses what was sent: 400"):
        InfluxClient(influx.url).send(["gpuguard_device,host= x=1"])


def test_what_cannot_be_sent_waits_and_goes_out_in_its_order():
    with a_web() as web:
        client, web.status = InfluxClient(web.url), 503
        for batch in ("a x=1", "b x=1"):
            with pytest.raises(GpuguardError, match="answers 503"):
                client.send([batch])
        web.status, web.got = 204, []
        client.send(["c x=1"])

    assert [body for _, _, body in web.got] == ["a x=1\n", "b x=1\n", "c x=1\n"]
    assert client.waiting == 0


def test_what_waits_is_bounded():
    client = InfluxClient(f"http://127.0.0.1:{free_port()}/write?db=x")
    for number in range(MAX_BATCHES + 5):
        with pytest.raises(GpuguardError, match="cannot be reached"):
            client.send([f"a x={number}"])

    assert client.waiting == MAX_BATCHES


def test_what_is_refused_does_not_stop_what_comes_behind_it():
    with a_web() as web:
        client, web.status = InfluxClient(web.url), 400
        with pytest.raises(GpuguardError, match="refuses"):
            client.send(["bad"])
        web.status, web.got = 204, []
        client.send(["good x=1"])

    assert [body for _, _, body in web.got] == ["good x=1\n"]


def test_the_token_goes_along_and_not_to_where_an_answer_redirects():
    with a_web() as web, a_web() as other:
        web.status, web.headers = 302, {"Location": other.url}
        with pytest.raises(GpuguardError, match="302"):
            InfluxClient(web.url, "s3cret").send(["a x=1"])

    assert web.got[0][1]["Authorization"] == "Token s3cret"
    assert other.got == []


def test_a_server_that_does_not_answer_is_given_up():
    class Silent(http.server.BaseHTTPRequestHandler):
        def handle(self) -> None:
            self.rfile.read()

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Silent) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,))
        thread.start()
        try:
            with pytest.raises(GpuguardError, match="cannot be reached"):
                InfluxClient(f"http://127.0.0.1:{server.server_port}/write", timeout=0.3).send(["a x=1"])
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.parametrize(
    ("url", "token"),
    [
        ("ftp://127.0.0.1/write", None),
        ("http:///write", None),
        ("http://127.0.0.1:99999/write", None),
        ("http://127.0.0.1/write db", None),
        ("http://db.example.org/write", "t"),
        ("http://127.0.0.1/write", "two\nlines"),
    ],
)
def test_an_address_that_will_not_do_is_refused(url, token):
    with pytest.raises(InvalidRequest, match="--influx"):
        InfluxClient(url, token)


def test_the_token_comes_from_a_file_that_is_ours_alone(tmp_path):
    start(str(tmp_path / "node"), "1xH100-80GB")
    token = tmp_path / "token"
    token.write_text("s3cret\n")
    os.chmod(token, 0o644)
    gpuguard = Gpuguard(tmp_path, None, GPUGUARD_INFLUX_TOKEN="of the environment")
    with a_web() as web:
        words = ["metrics", "--influx", web.url]
        open_to_others = gpuguard(*words, "--token-file", str(token))
        os.chmod(token, 0o400)
        assert gpuguard(*words, "--token-file", str(token)).returncode == 0
        assert gpuguard(*words).returncode == 0

    assert open_to_others.returncode == 2 and "open to others" in open_to_others.stderr
    assert [each[1]["Authorization"] for each in web.got] == ["Token s3cret", "Token of the environment"]


def test_a_server_that_is_away_is_an_exit_code(tmp_path):
    start(str(tmp_path / "node"), "1xH100-80GB")
    done = Gpuguard(tmp_path, None)("metrics", "--influx", f"http://127.0.0.1:{free_port()}/write?db=x")

    assert done.returncode == 1 and "cannot be reached" in done.stderr
