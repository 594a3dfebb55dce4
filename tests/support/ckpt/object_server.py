"""A real object store: Ceph's radosgw, with a monitor and an OSD in memory; and a proxy in front that makes it fail.

The three daemons are children in the foreground, in a directory of their own, and end with the test's process.
"""

from __future__ import annotations

import http.client
import os
import subprocess
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import boto3
from botocore.config import Config

from tests.support.free_port import free_port
from tests.support.requirements import need_program

ACCESS, SECRET = "test", "testtest"
_SYSTEM = "/usr/local/sbin:/usr/sbin:/sbin"
_CONF = """[global]
fsid = {fsid}
mon_host = [v2:127.0.0.1:{mon}/0]
mon_initial_members = a
public_addr = 127.0.0.1
osd_pool_default_size = 1
osd_pool_default_min_size = 1
osd_pool_default_pg_num = 1
osd_pool_default_pgp_num = 1
osd_pool_default_pg_autoscale_mode = off
osd_crush_chooseleaf_type = 0
mon_allow_pool_size_one = true
mon_max_pg_per_osd = 1000
mon_data_avail_crit = 0
osd_objectstore = memstore
memstore_device_bytes = {memory}
run_dir = {home}
log_file = {home}/$name.log
admin_socket = {home}/$name.asok
mon_data = {home}/mon
osd_data = {home}/osd
keyring = {home}/keyring
rgw_data = {home}
rgw_frontends = beast endpoint=127.0.0.1:{rgw} tcp_nodelay=1
rgw_enable_usage_log = false
"""


@contextmanager
def object_server(home: Path, memory_bytes: int = 8 << 30) -> Iterator[str]:
    """Give the URL of a store without buckets. Skips the test where radosgw is not installed."""
    need_program("radosgw", "ceph-mon", "ceph-osd", "ceph", package="radosgw ceph-mon ceph-osd ceph-common")
    for name in ("mon", "osd"):
        (home / name).mkdir(parents=True)
    fsid, port, conf = str(uuid.uuid4()), free_port(), home / "ceph.conf"
    conf.write_text(_CONF.format(fsid=fsid, mon=free_port(), rgw=port, home=home, memory=memory_bytes))
    environment = {**os.environ, "PATH": f"{os.environ['PATH']}:{_SYSTEM}", "CEPH_CONF": str(conf)}
    key, osd_key = home / "keyring", home / "osd-keyring"

    def run(*argv: str, given: str = "") -> str:
        done = subprocess.run(
            argv, env=environment, input=given, capture_output=True, text=True, timeout=60, check=True
        )
        return done.stdout.strip()

    def start(stack: ExitStack, *argv: str) -> None:
        out = stack.enter_context((home / f"{argv[0]}.out").open("w"))
        child = subprocess.Popen([*argv, "-c", str(conf), "-f"], env=environment, stdout=out, stderr=out)
        stack.callback(_end, child)

    all_of = ["--cap", "mon", "allow *", "--cap", "osd", "allow *"]
    run("ceph-authtool", "--create-keyring", str(key), "--gen-key", "-n", "mon.", "--cap", "mon", "allow *")
    run("ceph-authtool", str(key), "--gen-key", "-n", "client.admin", *all_of)
    run("ceph-authtool", "--create-keyring", str(osd_key), "--gen-key", "-n", "osd.0")
    mon = conf.read_text().split("mon_host = ")[1].split("\n")[0]
    run("monmaptool", "--create", "--fsid", fsid, "--addv", "a", mon, str(home / "monmap"))
    run("ceph-mon", "-c", str(conf), "--mkfs", "-i", "a", "--monmap", str(home / "monmap"), "--keyring", str(key))
    with ExitStack() as stack:
        start(stack, "ceph-mon", "-i", "a")
        osd, secret = str(uuid.uuid4()), run("ceph-authtool", "-p", "-n", "osd.0", str(osd_key))
        run("ceph", "osd", "new", osd, "-i", "-", given=f'{{"cephx_secret": "{secret}"}}')
        run("ceph-osd", "-i", "0", "--mkfs", "--osd-uuid", osd, "--keyring", str(osd_key))
        start(stack, "ceph-osd", "-i", "0", "--keyring", str(osd_key))
        names = ["--uid", "test", "--display-name", "test", "--access-key", ACCESS, "--secret-key", SECRET]
        run("radosgw-admin", "user", "create", *names)
        start(stack, "radosgw", "-n", "client.admin", "--keyring", str(key))
        _await(port)
        yield f"http://127.0.0.1:{port}"


def _end(child: subprocess.Popen[Any]) -> None:
    child.terminate()
    try:
        child.wait(10)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()


def _await(port: int) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=5)) as link:
                link.request("GET", "/")
                link.getresponse().read()
            return
        except OSError:
            if time.monotonic() > deadline:
                raise
            time.sleep(0.1)


def client_of(url: str) -> Any:
    """boto3's client, as a test looks at the store beside what it tests."""
    return boto3.client(
        "s3", endpoint_url=url, aws_access_key_id=ACCESS, aws_secret_access_key=SECRET, region_name="us-east-1",
        config=Config(request_checksum_calculation="when_required", response_checksum_validation="when_required"),
    )  # fmt: skip


@dataclass(frozen=True)
class Asked:
    """A request. ``path`` with its query; ``bytes_read``: of the answer."""

    method: str
    path: str
    headers: dict[str, str]


Answer = tuple[int, dict[str, str], bytes]


@dataclass
class Proxy:
    """A proxy that passes requests on, and answers some itself.

    ``instead`` is asked before each: its answer, or None; it may wait. ``after`` may change the store's answer.
    ``seen`` has all requests, ``sent_bytes`` counts the bytes of answers.
    """

    url: str
    instead: Callable[[Asked], Answer | None] = lambda asked: None
    after: Callable[[Asked, Answer], Answer] = lambda asked, answer: answer
    seen: list[Asked] = field(default_factory=list)
    sent_bytes: int = 0

    def reset(self) -> None:
        """Pass everything on, as at first."""
        self.instead, self.after = lambda asked: None, lambda asked, answer: answer
        self.seen, self.sent_bytes = [], 0


SLOW_DOWN: Answer = (
    503, {"Content-Type": "application/xml"},
    b"<?xml version='1.0'?><Error><Code>SlowDown</Code><Message>reduce your request rate</Message></Error>",
)  # fmt: skip


@contextmanager
def proxy_of(url: str) -> Iterator[Proxy]:
    """Give a proxy in front of a store."""
    host = url.removeprefix("http://")

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True

        def log_message(self, format: str, *arguments: object) -> None:
            """Say nothing."""

        def serve(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            asked = Asked(self.command, self.path, dict(self.headers))
            proxy.seen.append(asked)
            answer = proxy.instead(asked)
            if answer is None:
                answer = proxy.after(asked, self._passed_on(body))
            status, headers, data = answer
            proxy.sent_bytes += len(data)
            self.send_response(status)
            kept = {"content-length"} if self.command == "HEAD" else set()
            for name, value in headers.items():
                if name.lower() not in {"content-length", "transfer-encoding", "connection", "date", "server"} - kept:
                    self.send_header(name, value)
            if not kept:
                self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def _passed_on(self, body: bytes) -> Answer:
            with closing(http.client.HTTPConnection(host, timeout=60)) as link:  # a client may die within its body
                link.putrequest(self.command, self.path, skip_host=True, skip_accept_encoding=True)
                for name, value in self.headers.items():
                    if name.lower() not in ("expect", "connection"):
                        link.putheader(name, value)
                link.endheaders(body)
                answer = link.getresponse()
                return answer.status, dict(answer.getheaders()), answer.read()

        do_GET = do_PUT = do_POST = do_DELETE = do_HEAD = serve

    class Server(ThreadingHTTPServer):
        daemon_threads = True
        request_queue_size = 128  # a client may call many times at once

        def handle_error(self, request: Any, client_address: Any) -> None:
            """Say nothing: a client may be killed."""

    with Server(("127.0.0.1", 0), Handler) as server:
        proxy = Proxy(f"http://127.0.0.1:{server.server_address[1]}")
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield proxy
        server.shutdown()
        thread.join()
