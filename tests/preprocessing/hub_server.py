"""A server here that speaks the Hub's upload calls, as huggingface_hub 2.4 makes them."""

import base64
import hashlib
import json
import re
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

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


class Answers(BaseHTTPRequestHandler):
    """The calls of `create_repo`, `dataset_info` and `upload_folder`."""

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
        self.wfile.write(body)

    def answer(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        call = next(name for name, shape in CALLS.items() if re.fullmatch(shape, self.path))
        self.server.calls.append(call)
        if call != "put" and self.headers["Authorization"] != f"Bearer {TOKEN}":
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

    do_GET = do_POST = do_PUT = answer

    def on_create(self, body: bytes) -> None:
        asked = json.loads(body)
        self.server.created.append(asked)
        status = 200 if self.server.repo is None else 409
        if self.server.repo is None:
            self.server.repo = {"private": asked.get("visibility") == "private"}
        self.reply({"url": f"{self.server.url}/datasets/{REPO}"}, status)

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
        large = path.endswith((".parquet", ".npz"))
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
            {"commitUrl": f"{self.server.url}/datasets/{REPO}/commit/2", "commitOid": "2" * 40}
        )


CALLS = {
    "create": "/api/repos/create",
    "yaml": "/api/validate-yaml",
    "preupload": f"/api/datasets/{REPO}/preupload/main",
    "commit": f"/api/datasets/{REPO}/commit/main",
    "info": f"/api/datasets/{REPO}(/revision/main)?",
    "batch": rf"/datasets/{REPO}\.git/info/lfs/objects/batch",
    "put": "/put/[0-9a-f]{64}",
}
