"""Datasets by URI, from a real server on this machine: what is allowed arrives whole, everything else is refused."""

import gzip
import hashlib
import ipaddress
import os
import socket
import ssl
import threading
import time
from contextlib import closing, contextmanager
from datetime import UTC, datetime, timedelta
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import httpx
import pytest

from reflogp.scoring.data.read import RowSource
from reflogp.scoring.errors import DatasetError
from reflogp.service import fetch as fetching
from reflogp.service.fetch import FetchCancelledError, check_uri, fetch
from reflogp.service.fetched import DatasetQuota, FetchedFolder
from reflogp.service.ledger import Ledger
from reflogp.service.problems import Problem
from reflogp.service.settings import ServerSettings
from reflogp.store import UsageError
from reflogp.store.storage import open_filesystem
from tests.store.hub_server import TOKEN, HubFaults, hub
from tests.store.s3 import environment_of, s3_server

BODY = b'{"prompt": "p", "chosen": "c", "rejected": "r"}\n' * 1000
DIGEST = hashlib.sha256(BODY).hexdigest()


class Remote(BaseHTTPRequestHandler):
    """The remote side: answers by its path, remembers what it was asked."""

    protocol_version = "HTTP/1.1"
    asked: list[tuple[str, dict]] = []  # noqa: RUF012

    def log_message(self, *_):
        pass

    def answer(self, status: int, body: bytes = b"", **headers) -> None:
        self.send_response(status)
        for name, value in {"Content_Length": len(body), **headers}.items():
            if value is not None:
                self.send_header(name.replace("_", "-"), str(value))
        self.end_headers()
        self.wfile.write(body)

    def drip(self, bytes_to_send: bytes, seconds: float) -> None:
        for byte in bytes_to_send:
            self.wfile.write(bytes([byte]))
            self.wfile.flush()
            time.sleep(seconds)

    def do_GET(self):
        self.asked.append((self.path, dict(self.headers)))
        name = self.path.split("?")[0].rpartition("/")[2].partition(".")[0]
        port = self.server.server_address[1]
        try:
            self.reply(name, port)
        except (BrokenPipeError, ConnectionResetError):
            self.close_connection = True

    def reply(self, name: str, port: int) -> None:
        redirects = {
            "near": "good.jsonl",
            "absolute": f"http://127.0.0.1:{port}/prefs/good.jsonl",
            "status303": "good.jsonl",
            "out": f"http://127.0.0.1:{port}/secret/good.jsonl",
            "dots": "../secret/good.jsonl",
            "encoded": "%2e%2e/secret/good.jsonl",
            "loopback": f"http://localhost:{port}/prefs/good.jsonl",
            "metadata": "http://169.254.169.254/latest/meta-data/x.jsonl",
            "file": "file:///etc/passwd",
            "object": "s3://team/prefs/a.jsonl",
            "user": f"http://me@127.0.0.1:{port}/prefs/good.jsonl",
            "circle": "circle.jsonl",
            "nowhere": "",
            "odd": "http://127.0.0.1:1/prefs/good.jsonl",
        }
        chain = {f"chain{n}": f"chain{n - 1}.jsonl" for n in range(1, 9)}
        if name in redirects:
            status = 303 if name == "status303" else 302
            self.answer(status, Location=redirects[name] or None, Set_Cookie="id=1; Path=/")
        elif name in chain:
            self.answer(307, Location=chain[name])
        elif name == "missing":
            self.answer(404, b"a private page")
        elif name == "partial":
            self.answer(206, BODY)
        elif name == "none":
            self.answer(204, Content_Length=None)
        elif name == "packed":
            self.answer(200, gzip.compress(BODY), Content_Encoding="gzip")
        elif name == "bomb":
            self.answer(200, gzip.compress(b"0" * 50_000_000), Content_Encoding="gzip")
        elif name == "large":
            self.answer(200, b"x" * 2_000_000)
        elif name == "announced":
            self.answer(200, Content_Length=1 << 50)
        elif name == "negative":
            self.answer(200, Content_Length=-1)
        elif name == "truncated":
            self.answer(200, BODY, Content_Length=len(BODY) + 1)
            self.close_connection = True
        elif name in ("chunked", "cutchunks", "endless"):
            self.answer(200, Content_Length=None, Transfer_Encoding="chunked")
            while True:
                self.wfile.write(b"%x\r\n%s\r\n" % (len(BODY), BODY))
                if name == "chunked":
                    self.wfile.write(b"0\r\n\r\n")
                if name != "endless":
                    break
            self.close_connection = True
        elif name == "unbounded":
            self.answer(200, BODY, Content_Length=None, Connection="close")
            self.close_connection = True
        elif name == "drip":
            self.answer(200, Content_Length=10_000)
            self.drip(b"x" * 10_000, 0.05)
        elif name == "stall":
            self.answer(200, Content_Length=10_000)
            time.sleep(30)
        elif name == "driphead":
            self.drip(b"HTTP/1.1 200 OK\r\nX: " + b"x" * 1000, 0.05)
        elif name == "continues":
            while True:
                self.drip(b"HTTP/1.1 100 Continue\r\n\r\n", 0)
                time.sleep(0.05)
        elif name == "longhead":
            self.answer(200, BODY, **{f"X-{n}": "x" * 1000 for n in range(1000)})
        elif name == "nonsense":
            self.wfile.write(b"\0\1\2 nonsense\r\n\r\n")
            self.close_connection = True
        else:
            self.answer(200, BODY, Set_Cookie="id=1; Path=/")


@contextmanager
def remote_server(context: ssl.SSLContext | None = None):
    server = ThreadingHTTPServer(("127.0.0.1", 0), Remote)
    server.handle_error = lambda *_: None  # clients that hang up are what is tested
    if context:
        server.socket = context.wrap_socket(server.socket, server_side=True)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield server.server_address[1]
    finally:
        server.shutdown()
        server.server_close()


@pytest.fixture(scope="module")
def port():
    with remote_server() as found:
        yield found


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "fetched"
    made.mkdir()
    return made


def allowing(*prefixes: str, **settings) -> ServerSettings:
    return ServerSettings(store="store", dataset_uris=list(prefixes), **{"max_upload_bytes": 1_000_000, **settings})


def get(uri: str, folder, settings, cancelled=lambda: False):
    with closing(Ledger(folder.parent / f"{folder.name}.sqlite")) as ledger:
        return fetch(uri, FetchedFolder(folder, ledger, DatasetQuota(settings.max_uploads_bytes)), settings, cancelled)


# What is allowed


@pytest.mark.parametrize("name", ["good", "near", "absolute", "status303", "chunked", "chain3"])
def test_a_named_host_is_fetched_from(port, folder, name):
    settings = allowing(f"http://127.0.0.1:{port}/prefs/")
    uri = f"http://127.0.0.1:{port}/prefs/{name}.jsonl?signature=secret"
    check_uri(uri, settings)
    file, digest = get(uri, folder, settings)
    assert (file, digest, file.read_bytes()) == (folder / f"{DIGEST}.jsonl", DIGEST, BODY)
    assert list(folder.iterdir()) == [file]


def test_the_suffix_is_the_uris(port, folder):
    settings = allowing(f"http://localhost:{port}")
    assert get(f"http://LOCALHOST:{port}/x/good.CSV.GZ", folder, settings)[0].name == f"{DIGEST}.csv.gz"


def test_neither_proxies_nor_cookies_nor_encodings_are_used(port, folder):
    Remote.asked.clear()
    proxies = dict.fromkeys(("HTTP_PROXY", "http_proxy", "ALL_PROXY", "HTTPS_PROXY"), "http://127.0.0.1:1")
    with environment_of(proxies):
        get(f"http://127.0.0.1:{port}/prefs/near.jsonl", folder, allowing(f"http://127.0.0.1:{port}/prefs/"))
    assert len(Remote.asked) == 2
    for _, headers in Remote.asked:
        assert "Cookie" not in headers and "Authorization" not in headers
        assert headers["Accept-Encoding"] == "identity"
        assert headers["Host"] == f"127.0.0.1:{port}"


# What is refused without asking anybody

PREFIXES = (
    "https://data.example.org/prefs/",
    "https://plain.example.org/prefs",
    "https://ported.example.org:8443/",
    "http://[fd00::1]:8080/",
    "s3://team/prefs/",
    "hf://datasets/team/prefs/",
    "hf://datasets/pinned/prefs@v1/",
    "hf://datasets/deep/prefs/data/",
)


@pytest.mark.parametrize(
    "uri",
    [
        "https://data.example.org/prefs/a.jsonl",
        "HTTPS://Data.Example.ORG/prefs/deep/a.jsonl.gz?sig=a%2Fb",
        "https://data.example.org:443/prefs/a.parquet",
        "https://plain.example.org/prefs/a.csv",
        "https://ported.example.org:8443/a.jsonl",
        "http://[fd00:0::1]:8080/a.jsonl",
        "s3://team/prefs/a.jsonl",
        "hf://datasets/team/prefs/a.jsonl",
        "hf://datasets/team/prefs@v1/deep/a.jsonl.gz",
        "HF://datasets/team/prefs@refs/convert/parquet/default/train/0000.parquet",
        "hf://datasets/pinned/prefs@v1/a.jsonl",
        "hf://datasets/deep/prefs@main/data/a.jsonl",
        "hf://datasets/team/prefs",
        "hf://datasets/team/prefs/",
        "hf://datasets/team/prefs@v1",
        "HF://datasets/team/prefs@refs/convert/parquet",
        "hf://datasets/pinned/prefs@v1",
    ],
)
def test_what_a_prefix_allows_passes(uri):
    check_uri(uri, allowing(*PREFIXES))


@pytest.mark.parametrize(
    "uri",
    [
        "https://data.example.org/prefs.jsonl",
        "https://data.example.org/other/a.jsonl",
        "https://data.example.org/Prefs/a.jsonl",
        "https://data.example.org.evil.com/prefs/a.jsonl",
        "https://evil.com/data.example.org/prefs/a.jsonl",
        "https://data.example.organic/prefs/a.jsonl",
        "https://xdata.example.org/prefs/a.jsonl",
        "http://data.example.org/prefs/a.jsonl",
        "https://data.example.org:444/prefs/a.jsonl",
        "https://ported.example.org/a.jsonl",
        "https://plain.example.org/prefs-secret/a.jsonl",
        "https://plain.example.org/prefsa.jsonl",
        "http://127.0.0.1/a.jsonl",
        "s3://team/prefs-secret/a.jsonl",
        "s3://team/a.jsonl",
        "s3://team.evil/prefs/a.jsonl",
        "s3://teams/prefs/a.jsonl",
        "gs://team/prefs/a.jsonl",
        "hf://datasets/team/prefs-secret/a.jsonl",
        "hf://datasets/team/other/prefs/a.jsonl",
        "hf://datasets/teams/prefs/a.jsonl",
        "hf://datasets/Team/prefs/a.jsonl",
        "hf://datasets/pinned/prefs/a.jsonl",
        "hf://datasets/pinned/prefs@v2/a.jsonl",
        "hf://datasets/deep/prefs/a.jsonl",
        "hf://datasets/deep/prefs@data/a.jsonl",
        "hf://datasets/team/prefs-secret",
        "hf://datasets/team/other",
        "hf://datasets/teams/prefs",
        "hf://datasets/pinned/prefs",
        "hf://datasets/pinned/prefs@v12",
        "hf://datasets/deep/prefs",
        "hf://datasets/deep/prefs@data",
    ],
)
def test_what_no_prefix_allows_is_forbidden(uri, folder):
    settings = allowing(*PREFIXES)
    with pytest.raises(Problem) as caught:
        check_uri(uri, settings)
    assert caught.value.status == 403 and caught.value.next_step
    with pytest.raises(DatasetError):
        get(uri, folder, settings)


@pytest.mark.parametrize(
    "uri",
    [
        "https://data.example.org@evil.com/prefs/a.jsonl",
        "https://me:secret@data.example.org/prefs/a.jsonl",
        "https://@data.example.org/prefs/a.jsonl",
        "https://evil.com\\@data.example.org/prefs/a.jsonl",
        "https://data.example.org\\.evil.com/prefs/a.jsonl",
        "https://data.example.org/prefs\\..\\a.jsonl",
        "https://data.example.org/prefs/../a.jsonl",
        "https://data.example.org/prefs/./a.jsonl",
        "https://data.example.org/prefs//a.jsonl",
        "https://data.example.org/prefs/%2e%2e/a.jsonl",
        "https://data.example.org/prefs/%2E./a.jsonl",
        "https://data.example.org/prefs/..;/a.jsonl",
        "https://data.example.org/prefs/..%2fa.jsonl",
        "https://data.example.org/prefs/..%5Ca.jsonl",
        "https://data.example.org/prefs/%252e%252e/a.jsonl",
        "https://data.example.org/prefs/%00.jsonl",
        "https://data.example.org/prefs/a%0d%0aX:y.jsonl",
        "https://data.example.org/prefs/%zz.jsonl",
        "https://data.example.org/prefs/a.jsonl#x",
        "https://data.example.org#.evil.com/prefs/a.jsonl",
        "https://data.example.org/prefs/a.jsonl\r\nHost: evil.com",
        "https://data.example.org/prefs/a\0.jsonl",
        "https://data.example.org/prefs/a b.jsonl",
        "\thttps://data.example.org/prefs/a.jsonl",
        "https://data.example.org\t/prefs/a.jsonl",
        "https://dаta.example.org/prefs/a.jsonl",  # a Cyrillic letter
        "https://data。example.org/prefs/a.jsonl",
        "https://data.example.org./prefs/a.jsonl",
        "https://data..example.org/prefs/a.jsonl",
        "https://-data.example.org/prefs/a.jsonl",
        "https://data.example.org:/prefs/a.jsonl",
        "https://data.example.org:0443/prefs/a.jsonl",
        "https://data.example.org:+443/prefs/a.jsonl",
        "https://data.example.org:99999/prefs/a.jsonl",
        "https://data.example.org:443:443/prefs/a.jsonl",
        "https:///prefs/a.jsonl",
        "https:/data.example.org/prefs/a.jsonl",
        "https:data.example.org/prefs/a.jsonl",
        "//data.example.org/prefs/a.jsonl",
        "data.example.org/prefs/a.jsonl",
        "/etc/passwd",
        "file:///etc/a.jsonl",
        "file://data.example.org/prefs/a.jsonl",
        "ftp://data.example.org/prefs/a.jsonl",
        "gopher://data.example.org/prefs/a.jsonl",
        "data:text/plain,a.jsonl",
        "hf://datasets/me/a.jsonl",
        "s3a://team/prefs/a.jsonl",
        "http+unix://data.example.org/prefs/a.jsonl",
        "view-source:https://data.example.org/prefs/a.jsonl",
        "https://[fd00::1%25eth0]/a.jsonl",
        "https://[fd00::1/a.jsonl",
        "https://[::ffff:127.0.0.1].evil.com/a.jsonl",
        "https://2130706433/a.jsonl",
        "https://0x7f000001/a.jsonl",
        "https://0x7f.1/a.jsonl",
        "https://017700000001/a.jsonl",
        "https://0177.0.0.1/a.jsonl",
        "https://127.1/a.jsonl",
        "https://127.0.1/a.jsonl",
        "https://127.0.0.0x1/a.jsonl",
        "https://256.0.0.1/a.jsonl",
        "s3://team/prefs/../a.jsonl",
        "s3://team/prefs/%2e%2e/a.jsonl",
        "s3://team/prefs//a.jsonl",
        "s3://team/prefs/a.jsonl?versionId=1",
        "s3://me@team/prefs/a.jsonl",
        "s3://team:80/prefs/a.jsonl",
        "s3://../prefs/a.jsonl",
        "s3:///prefs/a.jsonl",
        "https://data.example.org/prefs/",
        "https://data.example.org/prefs/a.txt",
        "https://data.example.org/prefs/a.pickle",
        "https://data.example.org/prefs/a?x.jsonl",
        "https://data.example.org/prefs/a.parquet.gz",
        "https://data.example.org/prefs/" + "a" * 5000 + ".jsonl",
        "",
    ],
)
def test_uris_of_hostile_forms_are_refused(uri, folder):
    settings = allowing(*PREFIXES, "https://", "http://")
    with pytest.raises(Problem) as caught:
        check_uri(uri, settings)
    assert caught.value.status == 422
    with pytest.raises(DatasetError):
        get(uri, folder, settings)
    assert list(folder.iterdir()) == []


NOT_PUBLIC = [
    *(
        "127.0.0.1",
        "127.8.9.10",
        "0.0.0.0",
        "0.1.2.3",
        "10.0.0.1",
        "172.16.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "100.64.0.1",
    ),
    *("192.0.0.1", "192.0.2.1", "198.18.0.1", "198.51.100.1", "203.0.113.1", "224.0.0.1", "239.1.1.1", "240.0.0.1"),
    *("255.255.255.255", "192.88.99.1", "[::1]", "[::]", "[::127.0.0.1]", "[::ffff:127.0.0.1]", "[::ffff:8.8.8.8]"),
    *("[::ffff:0:127.0.0.1]", "[64:ff9b::7f00:1]", "[64:ff9b:1::1]", "[2002:7f00:1::]", "[2001::1]", "[2001:db8::1]"),
    *("[fe80::1]", "[fec0::1]", "[fc00::1]", "[fd00:ec2::254]", "[ff02::1]", "[100::1]", "[3fff::1]"),
]


@pytest.mark.slow
@pytest.mark.parametrize("host", NOT_PUBLIC)
def test_addresses_that_are_not_public_are_refused(host, folder):
    settings = allowing("https://", "http://")
    for uri in (f"https://{host}/a.jsonl", f"http://{host}/latest/a.jsonl"):
        with pytest.raises(Problem) as caught:
            check_uri(uri, settings)
        assert caught.value.status == 403
        with pytest.raises(DatasetError, match="host is not public"):
            get(uri, folder, settings)


@pytest.mark.parametrize("address", ["8.8.8.8", "1.1.1.1", "2606:4700::1111", "2a00:1450:4001::1"])
def test_addresses_that_are_public_pass(address):
    host = f"[{address}]" if ":" in address else address
    check_uri(f"https://{host}/a.jsonl", allowing("https://"))


def test_names_that_resolve_to_this_machine_are_refused(port, folder):
    own = socket.gethostname()
    Remote.asked.clear()
    for host in ("localhost", own):
        with pytest.raises(DatasetError, match=r"host is not public|cannot be resolved"):
            get(f"http://{host}/prefs/good.jsonl", folder, allowing("http://"))
    with pytest.raises(DatasetError, match="cannot be resolved"):
        get("https://no-such-host.invalid/a.jsonl", folder, allowing("https://"))
    assert Remote.asked == [] and list(folder.iterdir()) == []


def test_a_bare_scheme_is_for_its_own_port_only():
    with pytest.raises(Problem):
        check_uri("https://example.org:6379/a.jsonl", allowing("https://"))
    check_uri("https://example.org/a.jsonl", allowing("https://"))


def test_nothing_is_fetched_without_prefixes(folder):
    with pytest.raises(Problem) as caught:
        check_uri("https://example.org/a.jsonl", allowing())
    assert caught.value.status == 403 and "uploads" in caught.value.next_step


@pytest.mark.parametrize(
    "prefix", ["ftp://x/", "https:/x", "https://a@b/", "https:///x", "https://x/?a", "x", "https://x/../y"]
)
def test_a_prefix_that_is_none_is_named(prefix):
    with pytest.raises(UsageError, match="dataset_uris"):
        check_uri("https://example.org/a.jsonl", allowing(prefix))


# What the remote side may try


@pytest.mark.slow
@pytest.mark.parametrize(
    "name, says",
    [
        ("out", "do not allow fetching from this location"),
        ("dots", "do not allow fetching from this location"),
        ("encoded", "cannot be fetched"),
        ("loopback", "do not allow fetching|host is not public"),
        ("metadata", "host is not public"),
        ("file", "cannot be fetched"),
        ("object", "does not lead to an http"),
        ("user", "user name"),
        ("circle", "redirects more than 3"),
        ("chain4", "redirects more than 3"),
        ("nowhere", "does not lead to an http"),
        ("odd", "redirects to '127.0.0.1:1', but .* do not allow fetching from this location"),
        ("missing", "status 404"),
        ("partial", "status 206"),
        ("none", "status 204"),
        ("packed", "content encoding"),
        ("bomb", "content encoding"),
        ("large", "larger than 1,000,000"),
        ("announced", "larger than 1,000,000"),
        ("negative", "connection failed|may be incomplete"),
        ("endless", "larger than 1,000,000"),
        ("truncated", "connection failed"),
        ("cutchunks", "connection failed"),
        ("unbounded", "may be incomplete"),
        ("drip", "longer than 4 seconds"),
        ("driphead", "longer than 4 seconds"),
        ("continues", "longer than 4 seconds"),
        ("stall", "connection failed"),
        ("longhead", "connection failed"),
        ("nonsense", "connection failed"),
    ],
)
def test_hostile_answers_leave_nothing(port, folder, name, says):
    settings = allowing(f"http://127.0.0.1:{port}/prefs/", "http://", fetch_seconds=4, body_idle_seconds=2)
    begin = time.monotonic()
    with pytest.raises(DatasetError, match=says) as caught:
        get(f"http://127.0.0.1:{port}/prefs/{name}.jsonl?token=secret", folder, settings)
    assert time.monotonic() - begin < 15
    assert "secret" not in str(caught.value) and "private" not in str(caught.value)
    assert list(folder.iterdir()) == []


def test_a_server_that_is_not_there(folder):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        closed = taken.getsockname()[1]
    with pytest.raises(DatasetError, match="connection failed"):
        get(f"http://127.0.0.1:{closed}/a.jsonl", folder, allowing(f"http://127.0.0.1:{closed}"))


def test_a_cancelled_fetch_ends_soon(port, folder):
    cancelled = threading.Event()
    threading.Timer(0.5, cancelled.set).start()
    begin = time.monotonic()
    with pytest.raises(FetchCancelledError):
        get(f"http://127.0.0.1:{port}/drip.jsonl", folder, allowing(f"http://127.0.0.1:{port}"), cancelled.is_set)
    assert time.monotonic() - begin < 3
    assert list(folder.iterdir()) == []


def test_a_folder_that_went_away_is_said(port, tmp_path):
    settings = allowing(f"http://127.0.0.1:{port}")
    with closing(Ledger(tmp_path / "jobs.sqlite")) as ledger:
        fetched = FetchedFolder(tmp_path / "gone", ledger, DatasetQuota(settings.max_uploads_bytes))
        fetched.folder.rmdir()
        with pytest.raises(DatasetError, match="cannot write the dataset"):
            fetch(f"http://127.0.0.1:{port}/good.jsonl", fetched, settings, lambda: False)


# The connection goes to the address that was checked, and the certificate is the name's


@pytest.fixture(scope="module")
def certificate(tmp_path_factory):
    """A certificate for data.example.org that signs itself, and its key."""
    from cryptography import x509
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    now = datetime.now(UTC)
    made = (
        x509.CertificateBuilder(name, name, key.public_key(), x509.random_serial_number(), now, now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.DNSName("data.example.org")]), False)
        .add_extension(x509.BasicConstraints(True, None), True)
        .sign(key, hashes.SHA256())
    )
    file = tmp_path_factory.mktemp("tls") / "both.pem"
    private = key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    file.write_bytes(made.public_bytes(serialization.Encoding.PEM) + private)
    return file


@pytest.mark.parametrize("host, works", [("data.example.org", True), ("other.example.org", False)])
def test_the_checked_address_is_reached_under_the_hosts_name(certificate, host, works):
    import asyncio

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    asked_for = []
    context.sni_callback = lambda _, name, __: asked_for.append(name)
    Remote.asked.clear()

    async def ask(port: int) -> int:
        uri = fetching._Uri("https", host, port, "/prefs/good.jsonl")
        async with httpx.AsyncHTTPTransport(verify=httpx.create_ssl_context(), trust_env=False) as transport:
            response = await fetching._ask(transport, uri, ["127.0.0.1"], 5.0)  # the name itself leads nowhere
            await response.aclose()
            return response.status_code

    with environment_of({"SSL_CERT_FILE": str(certificate)}), remote_server(context) as port:
        if works:
            assert asyncio.run(ask(port)) == 200
            assert Remote.asked[0][1]["Host"] == f"{host}:{port}"
        else:
            with pytest.raises(httpx.ConnectError, match=r"(?i)hostname mismatch|certificate"):
                asyncio.run(ask(port))
    assert asked_for == [host]


def test_a_certificate_that_nobody_signed_is_refused(certificate, folder):
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate)
    with remote_server(context) as port, pytest.raises(DatasetError, match="connection failed"):
        get(f"https://localhost:{port}/good.jsonl", folder, allowing(f"https://localhost:{port}"))


@pytest.mark.parametrize("says", ["No such file", "NO_CERTIFICATE"])
def test_root_certificates_that_cannot_be_read_are_named(says, port, folder, tmp_path):
    file = tmp_path / "roots.pem"
    if says == "NO_CERTIFICATE":
        file.write_text("no certificate")
    with environment_of({"SSL_CERT_FILE": str(file)}), pytest.raises(DatasetError, match=f"root certificates .*{says}"):
        get(f"http://127.0.0.1:{port}/good.jsonl", folder, allowing(f"http://127.0.0.1:{port}"))
    assert not list(folder.iterdir())


def test_every_address_of_a_name_must_be_public():
    good, bad = ipaddress.ip_address("8.8.8.8"), ipaddress.ip_address("10.0.0.1")
    fetching._check_public([good])
    for addresses in ([good, bad], [bad, good]):
        with pytest.raises(ValueError, match="host is not public"):
            fetching._check_public(addresses)


# Object stores


@pytest.fixture(scope="module")
def bucket():
    with s3_server("team") as environment, environment_of(environment):
        filesystem = open_filesystem("s3://team")
        objects = {"prefs/a.jsonl": BODY, "secret/a.jsonl": BODY, "prefs/a-b_c.csv.gz": gzip.compress(BODY)}
        for key, content in {**objects, "prefs/large.jsonl": b"x" * 3_000_000}.items():
            with filesystem.open_output_stream(key, compression=None, buffer_size=1 << 23) as sink:
                sink.write(content)
        yield environment


def test_objects_are_fetched(bucket, folder):
    file, digest = get("s3://team/prefs/a.jsonl", folder, allowing("s3://team/prefs/"))
    assert (file.name, digest, file.read_bytes()) == (f"{DIGEST}.jsonl", DIGEST, BODY)
    packed, _ = get("s3://team/prefs/a-b_c.csv.gz", folder, allowing("s3://"))
    assert packed.name.endswith(".csv.gz") and gzip.decompress(packed.read_bytes()) == BODY  # as it lies there, not unpacked


@pytest.mark.parametrize(
    "uri, says",
    [
        ("s3://team/prefs/none.jsonl", "object does not exist"),
        ("s3://team/prefs/large.jsonl", "larger than 1,000,000"),
        ("s3://team/secret/a.jsonl", "do not allow fetching from this location"),
        ("s3://other/prefs/a.jsonl", "do not allow fetching from this location"),
        ("s3://team/prefs/../secret/a.jsonl", "segment that is empty"),
    ],
)
def test_objects_that_are_not_there_or_not_allowed(bucket, folder, uri, says):
    with pytest.raises(DatasetError, match=says):
        get(uri, folder, allowing("s3://team/prefs/"))
    assert list(folder.iterdir()) == []


def test_a_cancelled_object_leaves_nothing(bucket, folder):
    with pytest.raises(FetchCancelledError):
        get("s3://team/prefs/a.jsonl", folder, allowing("s3://team/"), lambda: True)
    assert list(folder.iterdir()) == [] and os.environ["AWS_REGION"]


# The Hugging Face Hub


@pytest.fixture
def hub_of_team(monkeypatch):
    with hub() as found:
        files = {"prefs/a.jsonl": BODY, "prefs/b-c d.csv.gz": gzip.compress(BODY), "prefs/large.jsonl": b"x" * 3_000_000}
        found.make("team/prefs", files)
        found.make("team/secret", files)
        found.make("team/prefs", {**files, "prefs/a.jsonl": BODY * 2})  # another commit
        template = found.url + "/{repo_id}/resolve/{revision}/{filename}"
        settings = {"ENDPOINT": found.url, "HUGGINGFACE_CO_URL_TEMPLATE": template, "HF_HUB_OFFLINE": False}
        for name, value in settings.items():
            monkeypatch.setattr(f"huggingface_hub.constants.{name}", value)
        monkeypatch.setenv("HF_TOKEN", TOKEN)
        yield found


def test_files_of_the_hub_are_fetched(hub_of_team, folder, monkeypatch):
    monkeypatch.setattr(fetching, "_CHUNK", 10_000)  # several requests
    settings = allowing("hf://datasets/team/prefs/")
    first = hub_of_team.repositories["team/prefs"].commits[0][0]
    file, digest = get(f"hf://datasets/team/prefs@{first}/prefs/a.jsonl", folder, settings)
    assert (file.name, digest, file.read_bytes()) == (f"{DIGEST}.jsonl", DIGEST, BODY)
    assert get("hf://datasets/team/prefs/prefs/a.jsonl", folder, settings)[0].read_bytes() == BODY * 2
    packed, _ = get("hf://datasets/team/prefs@main/prefs/a.jsonl", folder, allowing("hf://"))
    assert packed.read_bytes() == BODY * 2
    assert hub_of_team.downloaded.count("prefs/a.jsonl") > 10


@pytest.mark.parametrize(
    "uri, says",
    [
        ("hf://datasets/team/prefs/none.jsonl", "has no file none.jsonl"),
        ("hf://datasets/team/prefs@none/prefs/a.jsonl", "the token has no permission to read it"),
        ("hf://datasets/team/nothing/prefs/a.jsonl", "the token has no permission to read it"),
        ("hf://datasets/team/prefs/prefs/large.jsonl", "larger than 1,000,000"),
        ("hf://datasets/team/prefs/prefs", "does not end in"),
        ("hf://datasets/team/a.jsonl", "is not the URI of a file on the Hub"),
        ("hf://datasets/a.jsonl", "is not the URI of a file on the Hub"),
        ("hf://models/team/prefs/a.jsonl", "URI of a dataset on the Hub must be hf://datasets"),
        ("hf://datasets/team/prefs/a.jsonl?token=x", "URI of a dataset on the Hub must be hf://datasets"),
        ("hf://datasets/team/prefs/a%41.jsonl", "URI of a dataset on the Hub must be hf://datasets"),
        ("hf://datasets/team/prefs@refs/pr/1/a.jsonl@b.jsonl", "is not the URI of a file on the Hub"),
        ("hf://datasets/team/prefs@/a.jsonl", "is not the URI of a file on the Hub"),
        ("hf://datasets/team/prefs/../secret/prefs/a.jsonl", "segment that is empty"),
        ("hf://datasets/team/prefs//a.jsonl", "segment that is empty"),
    ],
)
def test_files_of_the_hub_that_are_not_there_or_are_none(hub_of_team, folder, uri, says):
    with pytest.raises(DatasetError, match=says):
        get(uri, folder, allowing("hf://"))
    assert list(folder.iterdir()) == []


@pytest.mark.parametrize(
    "fault, says",
    [
        ({"status": 403}, "has no permission"),
        ({"status": 404}, "has no permission|404"),
        ({"most_bytes": 100}, "hf://"),
        ({"downloads_left": 0}, "broken off"),
    ],
)
def test_a_hub_that_fails_leaves_nothing(hub_of_team, folder, fault, says):
    hub_of_team.faults = HubFaults(**fault)
    with pytest.raises(DatasetError, match=says):
        get("hf://datasets/team/prefs/prefs/a.jsonl", folder, allowing("hf://datasets/team/"))
    assert list(folder.iterdir()) == []


def test_a_cancelled_file_of_the_hub_leaves_nothing(hub_of_team, folder):
    with pytest.raises(FetchCancelledError):
        get("hf://datasets/team/prefs/prefs/a.jsonl", folder, allowing("hf://datasets/team/"), lambda: True)
    assert list(folder.iterdir()) == []


def test_a_file_of_the_hub_is_a_dataset_where_no_service_is_asked(hub_of_team, tmp_path, monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(tmp_path / "cache"))
    assert len(list(RowSource("hf://datasets/team/prefs/prefs/a.jsonl"))) == 2000
    with pytest.raises(DatasetError, match=r"has no file none\.jsonl"):
        RowSource("hf://datasets/team/prefs/none.jsonl")
    with pytest.raises(DatasetError, match="does not end in"):
        RowSource("hf://datasets/team/prefs/none.txt")
    with pytest.raises(DatasetError, match="no such file"):  # a service's workers open files only
        RowSource("hf://datasets/team/prefs/prefs/a.jsonl", confined=True)
