"""To and from the Hugging Face Hub: named files and a card go up, named files come down.

What is data and what is a model, and what their cards say, is for others to know. Nothing is
written into the user's folders, and the access token is kept out of every message.
"""

import logging
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from alphastomics.errors import InputError, keep_secret, quoted, redacted

logger = logging.getLogger(__name__)

CARD_FILE = "README.md"
HUB_ID = re.compile(r"\w[\w.-]*/\w[\w.-]*")  # owner/name; neither begins with a dot
# First parts of a path that nobody's account on the Hub is meant by.
LOCAL_WORDS = {
    *("data", "dataset", "datasets", "processed", "output", "outputs", "result", "results"),
    *("run", "runs", "tmp", "slices", "home", "mnt", "scratch", "checkpoints"),
}


def is_hub_id(where: str) -> bool:
    """Tell a name on the Hub from a path: one that looks local never goes to the network."""
    if not HUB_ID.fullmatch(where):
        return False
    owner = where.partition("/")[0]
    return owner.lower() not in LOCAL_WORDS and not Path(owner).exists()


LICENCE_ID = re.compile(r"[a-z0-9][a-z0-9.+-]*")
SHOWN_WORDS = 300  # letters of what the Hub said
SHOWN_LETTERS = 80  # of a name, in a card
LICENCE_FIELDS = ("license", "license_name", "license_link")
NO_LICENCE = {"license": "other", "license_name": "unknown"}
UNAUTHORIZED, FORBIDDEN, NOT_FOUND, SERVER_ERROR = 401, 403, 404, 500

RepoKind = Literal["dataset", "model"]
Licence = dict[str, Any]


@dataclass(frozen=True)
class Connection:
    """A repository on the Hub, and who asks for it; nothing is sent before `publish`.

    Parameters
    ----------
    client
        The package huggingface_hub.
    repo_id
        Name of the repository, as owner/name.
    secret
        Access token; None reads what is public.
    writing
        Whether something is to be sent.
    """

    client: Any
    repo_id: str
    secret: str | None
    writing: bool

    def publish(
        self,
        kind: RepoKind,
        files: Mapping[str, Path],
        card: Callable[[Licence], str],
        *,
        private: bool,
        licence: str | None,
    ) -> str:
        """Send files and their card as one commit; return the address of the repository.

        Giving the same command again goes on: the Hub knows files by their digests, so that what
        has arrived is not sent again.

        Parameters
        ----------
        kind
            What the repository holds; it is made if there is none.
        files
            Name in the repository -> file here.
        card
            Makes the card's text from the fields of the licence.
        private
            Make it private; a public one of that name is refused.
        licence
            Licence for the card; None keeps what the owner wrote there.
        """
        with self.translated_errors():
            stated = None if licence is None else licence_id(licence)
            api = self.client.HfApi(token=self.secret)
            # None, not False: without the flag, the owner's own default stands.
            address = api.create_repo(
                self.repo_id, repo_type=kind, private=private or None, exist_ok=True
            )
            known = api.repo_info(self.repo_id, repo_type=kind)
            if private and not known.private:
                raise InputError(
                    f"{self.repo_id}: exists on the Hub and is public, so nothing was sent: make "
                    "it private in its settings there, choose another --repo_id, or leave "
                    "--private out"
                )
            text = card(licence_of(known.card_data) if stated is None else {"license": stated})
            logger.info("uploading %d files to %s", len(files) + 1, address)
            # Card and files are one commit, so that readers never meet half of it.
            add = self.client.CommitOperationAdd
            api.create_commit(
                self.repo_id,
                [add(CARD_FILE, text.encode()), *(add(*item) for item in files.items())],
                commit_message=f"Upload a {kind} of AlphaSTomics",
                repo_type=kind,
            )
        return str(address)

    def fetch(self, name: str, revision: str | None, *, needed: bool) -> Path | None:
        """Download a file of a model, or find it in the cache; None where there is none."""
        with self.translated_errors():
            try:
                path = self.client.hf_hub_download(
                    self.repo_id, name, revision=revision, token=self.secret
                )
            except self.client.errors.EntryNotFoundError:
                if needed:
                    raise
                return None
        return Path(path)

    @contextmanager
    def translated_errors(self) -> Iterator[None]:
        """Convert what goes wrong on the way into one line, without the token."""
        hub = self.client
        # ValueError and RuntimeError: how the client wraps replies and files that went wrong.
        failures = (hub.errors.HTTPError, OSError, ValueError, RuntimeError)
        try:
            with hidden_in_logs(self.secret):
                yield
        except InputError as error:
            raise InputError(redacted(str(error))) from None
        except failures as error:
            if isinstance(error, OSError) and error.filename:
                raise  # a file here, not the Hub: the entry point names it
            # from None: the client's own message may quote the header that carries the token.
            message = explained(error, self.repo_id, hub.constants.ENDPOINT, writing=self.writing)
            raise InputError(redacted(message)) from None


def connect(repo_id: str, token: str | None, *, writing: bool) -> Connection:
    """Check the name and find the token: the one given, or the usual login."""
    hub = _client()
    _require_repo_id(hub, repo_id)
    secret = hub.get_token() if token is None else token
    if secret is None and writing:
        raise InputError(
            "upload: there is no Hub login on this machine: run `hf auth login`, set HF_TOKEN, "
            "or give --token"
        )
    if secret is not None and not re.fullmatch(r"[!-~]+", secret):
        raise InputError("--token: is empty, or holds spaces or other letters than a token has")
    keep_secret(secret)
    return Connection(hub, repo_id, secret, writing)


def _client() -> Any:
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError as error:
        raise InputError(
            "the Hub: needs huggingface_hub, which is not installed: "
            "pip install 'alphastomics[hub]'"
        ) from error
    return huggingface_hub


def _require_repo_id(hub: Any, repo_id: str) -> None:
    try:
        hub.utils.validate_repo_id(repo_id)
    except hub.errors.HFValidationError as error:
        raise InputError(f"--repo_id: {error}") from error
    if not HUB_ID.fullmatch(repo_id):
        raise InputError(f"--repo_id: expected owner/name, got {repo_id!r}")


@contextmanager
def hidden_in_logs(secret: str | None) -> Iterator[None]:
    """Take the token out of whatever is logged meanwhile, by the client or by what it calls."""
    keep_secret(secret)

    def redact(record: logging.LogRecord) -> bool:
        record.msg, record.args = redacted(record.getMessage()), ()
        return True

    handlers = [
        handler
        for name in (None, "huggingface_hub")
        for handler in list(logging.getLogger(name).handlers)
    ]
    for handler in handlers:
        handler.addFilter(redact)
    try:
        yield
    finally:
        for handler in handlers:
            handler.removeFilter(redact)


def explained(error: BaseException, repo_id: str, endpoint: str, *, writing: bool) -> str:
    """Say in one line what went wrong on the way to the Hub, and what to do."""
    cause: BaseException = error
    while isinstance(cause, RuntimeError) and cause.__cause__ is not None:
        cause = cause.__cause__
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if status is None:
        said = quoted(cause, SHOWN_WORDS) or type(cause).__name__
    else:  # the client's own words quote addresses, and those of storage are signed
        reason = quoted(getattr(cause, "server_message", None) or "", SHOWN_WORDS)
        said = f"status {status}: {reason}" if reason else f"status {status}"
    if status == UNAUTHORIZED:
        advice = "the Hub refused the token: give a valid one, or run `hf auth login` again"
    elif status == FORBIDDEN or isinstance(cause, PermissionError):
        deed = "write there: give one with write access" if writing else "read it: give another one"
        advice = f"the token may not {deed}, or another owner"
    elif status == NOT_FOUND:
        advice = (
            f"{endpoint} knows no such owner, repository or file: check --repo_id and the token"
        )
    elif status is not None and status < SERVER_ERROR:
        advice = f"the Hub refused the {'upload' if writing else 'download'}"
    elif status is not None:
        advice = f"{endpoint} has a fault of its own: give the same command again later"
    elif isinstance(cause, ValueError):
        advice = f"{endpoint} did not answer as the Hub does: check HF_ENDPOINT and the network"
    else:
        advice = (
            f"the connection to {endpoint} failed: check the network and give the same command "
            f"again{'; what has arrived is not sent twice' if writing else ''}"
        )
    return f"{repo_id}: {advice} ({said})"


def licence_id(text: str) -> str:
    """Check that a licence is spelled as the Hub spells them."""
    if not LICENCE_ID.fullmatch(text):
        raise InputError(
            f"--license: expected an identifier of the Hub such as mit, apache-2.0 or cc-by-4.0, "
            f"got {text!r}"
        )
    return text


def licence_of(known: Any) -> Licence:
    """Keep the licence that the owner wrote into the card on the Hub; none is stated otherwise."""
    fields = {} if known is None else known.to_dict()
    stated = {name: fields[name] for name in LICENCE_FIELDS if fields.get(name)}
    return stated if "license" in stated else dict(NO_LICENCE)


def licence_note(licence: Licence, kind: RepoKind) -> str:
    """Say in the card under which terms its content may be used."""
    if licence == NO_LICENCE:
        return (
            f"**Licence: not stated.** The owner of this {kind} has not said under which terms it "
            "may be used. Owner: set `license` in the first lines of this card; a later upload "
            "keeps it."
        )
    named = licence.get("license_name") or licence["license"]
    return f"**Licence:** {plain_markdown(str(named))}"


def plain_markdown(text: str) -> str:
    """Make a name from the data harmless in Markdown: every letter stands for itself."""
    printable = "".join(letter if letter.isprintable() else " " for letter in text)
    short = " ".join(printable.split())
    return escaped(short if len(short) <= SHOWN_LETTERS else short[: SHOWN_LETTERS - 1] + "…")


def escaped(text: str) -> str:
    """Escape what Markdown would act on."""
    return re.sub(r"([!-+./:-@\[-`{-~])", r"\\\1", " ".join(text.split()))


def markdown_table(header: list[str], rows: list[list[str]]) -> str:
    """Write a table in Markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def listed(names: list[str], shown: int, where: str) -> str:
    """Count names and show the first of them; the rest is in a file."""
    if not names:
        return "None given."
    more = len(names) - shown
    tail = f", … and {more:,} more in `{where}`" if more > 0 else ""
    return f"{len(names):,}: {', '.join(map(plain_markdown, names[:shown]))}{tail}."
