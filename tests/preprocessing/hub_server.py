"""A server here that speaks the Hub's calls, as huggingface_hub 2.4 makes them."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import yaml

TOKEN = "hf_aVerySecretToken123"
REPO = "somebody/brain-atlas"


class Hub(ThreadingHTTPServer):
    """A Hub with one shelf: what was asked, what was sent, and how it shall misbehave."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Answers)
        self.url = f"http://127.0.0.1:{self.server_port}"
        self.calls: list[str] = []
        self.stored: dict[str, bytes] = {}  # large files, by sha256
        self.files: dict[str, bytes] = {}  # what is committed, by name
        self.repo: dict | None = None
        self.card_data: dict | None = None
        self.created: list[dict] = []
        self.refuse: dict[str, int] = {}  # call -> status
        self.cut: set[str] = set()  # calls whose connection is cut
        self.welcome: set[str | None] = {f"Bearer {TOKEN}"}  # None: anybody

    @property
    def path(self) -> str:
        """Return where the repository is: models have no prefix."""
        return REPO if self.created[0].get("type", "model") == "model" else f"datasets/{REPO}"


class Answers(BaseHTTPRequestHandler):
    """The calls of `create_repo`, `repo_info`, `upload_folder` and `hf_hub_download`."""

    server: Hub
    protocol_version = "HTTP/1.1"
    wbufsize = -1  # one packet a reply: two of them would wait for each other

    def log_message(self, *_arguments) -> None:
        """Say nothing."""

    def reply(self, content: dict, status: int = 200, **headers: str) -> None:
        body = json.dumps(content).encode()
        self.send_response(status)
        for name, value in {"Content-Type": "application/json", **headers}.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        call = next(name for name, shape in CALLS.items() if re.fullmatch(shape, self.path))
        self.server.calls.append(call)
        if call != "put" and self.headers["Authorization"] not in self.server.welcome:
            # A careless server repeats what it was given: our messages still must not.
            given = self.headers["Authorization"].removeprefix("Bearer ")
            self.reply({"error": f"Invalid token {given}"}, 401, X_HF_Warning=f"a; bad {given}")
        elif call in self.server.cut:
            self.close_connection = True
            self.connection.close()
        elif call in self.server.refuse:
            self.reply({"error": f"no {call} for you"}, self.server.refuse[call])
        else:
            getattr(self, f"on_{call}")(body)

    do_GET = do_POST = do_PUT = do_HEAD = answer

    def on_create(self, body: bytes) -> None:
        asked = json.loads(body)
        self.server.created.append(asked)
        status = 200 if self.server.repo is None else 409
        if self.server.repo is None:
            self.server.repo = {"private": asked.get("visibility") == "private"}
        self.reply({"url": f"{self.server.url}/{self.server.path}"}, status)

    def on_info(self, _body: bytes) -> None:
        if self.server.repo is None:
            self.reply({"error": "not found"}, 404, X_Error_Code="RepoNotFound")
            return
        card = {} if self.server.card_data is None else {"cardData": self.server.card_data}
        self.reply({"id": REPO, "sha": "1" * 40, **self.server.repo, **card})

    def on_yaml(self, body: bytes) -> None:
        yaml.safe_load(json.loads(body)["content"].split("---")[1])
        self.reply({"errors": [], "warnings": []})

    def on_preupload(self, body: bytes) -> None:
        self.reply({"files": [self.mode_of(file["path"]) for file in json.loads(body)["files"]]})

    def mode_of(self, path: str) -> dict:
        large = path.endswith((".parquet", ".npz", ".safetensors"))
        content = self.server.files.get(path)
        if content is None:
            oid = None
        elif large:
            oid = hashlib.sha256(content).hexdigest()
        else:
            oid = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        mode = "lfs" if large else "regular"
        return {"path": path, "uploadMode": mode, "shouldIgnore": False, "oid": oid}

    def on_batch(self, body: bytes) -> None:
        objects = []
        for known in json.loads(body)["objects"]:
            action = {"upload": {"href": f"{self.server.url}/put/{known['oid']}"}}
            missing = known["oid"] not in self.server.stored
            objects.append({**known, **({"actions": action} if missing else {})})
        self.reply({"transfer": "basic", "objects": objects})

    def on_put(self, body: bytes) -> None:
        oid = self.path.rpartition("/")[2]
        assert hashlib.sha256(body).hexdigest() == oid
        assert "Authorization" not in self.headers
        self.server.stored[oid] = body
        self.reply({})

    def on_commit(self, body: bytes) -> None:
        for line in body.splitlines():
            step = json.loads(line)
            value = step["value"]
            if step["key"] == "file":
                self.server.files[value["path"]] = base64.b64decode(value["content"])
            elif step["key"] == "lfsFile":
                self.server.files[value["path"]] = self.server.stored[value["oid"]]
        self.reply(
            {"commitUrl": f"{self.server.url}/{self.server.path}/commit/2", "commitOid": "2" * 40}
        )

    def on_resolve(self, _body: bytes) -> None:
        content = self.server.files.get(self.path.rpartition("/")[2])
        if content is None:
            self.reply({"error": "no such file"}, 404, X_Error_Code="EntryNotFound")
            return
        self.send_response(200)
        self.send_header("ETag", f'"{hashlib.sha256(content).hexdigest()}"')
        self.send_header("X-Repo-Commit", "2" * 40)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)


CALLS = {
    "create": "/api/repos/create",
    "yaml": "/api/validate-yaml",
    "preupload": f"/api/(datasets|models)/{REPO}/preupload/main",
    "commit": f"/api/(datasets|models)/{REPO}/commit/main",
    "info": f"/api/(datasets|models)/{REPO}(/revision/main)?",
    "batch": rf"/(datasets/)?{REPO}\.git/info/lfs/objects/batch",
    "put": "/put/[0-9a-f]{64}",
    "resolve": f"/{REPO}/resolve/[^/]+/[^/]+",
}


@contextmanager
def served(monkeypatch, empty: Path) -> Iterator[Hub]:
    """Point the client to a fresh server; its pauses between attempts are cut short."""
    import huggingface_hub

    with Hub() as result:
        thread = threading.Thread(target=result.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        monkeypatch.setattr("huggingface_hub.constants.ENDPOINT", result.url)
        files = result.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr("huggingface_hub.constants.HUGGINGFACE_CO_URL_TEMPLATE", files)
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_DISABLE_XET", True)
        monkeypatch.setattr("huggingface_hub.constants.HF_TOKEN_PATH", str(empty / "none"))
        monkeypatch.setattr("huggingface_hub.constants.HF_HUB_CACHE", str(empty / "cache"))
        monkeypatch.setattr("huggingface_hub.utils._http.time.sleep", lambda _seconds: None)
        monkeypatch.delenv("HF_TOKEN", raising=False)
        yield result
        result.shutdown()
        thread.join()
    huggingface_hub.close_session()
