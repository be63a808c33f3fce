"""Who may call what: keys from files, compared by digest in constant time.

Every path needs a user key unless it is listed as public; admin paths need an admin key. Without
an admin file they answer only on a loopback address. Keys stand in no message and no log.
"""

import hashlib
import hmac
import ipaddress
from collections.abc import Iterable
from enum import Enum
from pathlib import Path

from starlette.datastructures import Headers

from engine.config import ServerConfig
from engine.errors import ConfigError
from engine.server.errors import ApiError

PUBLIC_PATHS = frozenset({"/", "/health", "/ready", "/metrics", "/version", "/openapi.json"})
PUBLIC_PREFIX = "/page/"
ADMIN_PATHS = frozenset(
    {
        "/v1/load_lora_adapter",
        "/v1/load_lora_adapter_from_tensors",
        "/v1/unload_lora_adapter",
    }
)
MAX_KEY_CHARS = 512


class Access(Enum):
    public = "public"
    user = "user"
    admin = "admin"


def access_of(path: str) -> Access:
    """What a path needs; one that is unknown needs a user key."""
    if path in ADMIN_PATHS:
        return Access.admin
    if path in PUBLIC_PATHS or path.startswith(PUBLIC_PREFIX):
        return Access.public
    return Access.user


class Keys:
    """The keys of a server. Admin keys open user paths, too."""

    def __init__(
        self, user: Iterable[str] | None, admin: Iterable[str] | None, *, loopback: bool
    ) -> None:
        """None: no file was configured. `loopback`: the server is bound to such an address."""
        self._user = None if user is None else [_digest(key) for key in user]
        self._admin = None if admin is None else [_digest(key) for key in admin]
        self._loopback = loopback

    @classmethod
    def from_config(cls, cfg: ServerConfig) -> "Keys":
        """Read the files. Raises ConfigError."""
        return cls(
            _read("server.api_keys_file", cfg.api_keys_file),
            _read("server.admin_keys_file", cfg.admin_keys_file),
            loopback=is_loopback(cfg.host),
        )

    def check(self, path: str, headers: Headers) -> None:
        """Raise ApiError unless the caller may use `path`."""
        access = access_of(path)
        if access is Access.user and self._user is not None:
            self._require(headers, [*self._user, *(self._admin or [])])
        elif access is Access.admin and self._admin is None:
            self._check_local(headers)
        elif access is Access.admin:
            self._check_admin(headers)

    def _check_admin(self, headers: Headers) -> None:
        assert self._admin is not None
        self._require(headers, [*self._admin, *(self._user or [])])
        if not _among(_bearer(headers), self._admin):
            raise _forbidden("this route needs an admin key; the given key is a user's")

    def _check_local(self, headers: Headers) -> None:
        """Without admin keys: only the machine itself, and no web page of another origin."""
        if not self._loopback:
            raise _forbidden(
                "admin routes are off: the server is not bound to a loopback address and "
                "server.admin_keys_file is not set; set it to a file with one key a line"
            )
        host, origin = headers.get("host", ""), headers.get("origin")
        if not is_loopback(_hostname(host)) or origin not in (None, f"http://{host}"):
            raise _forbidden(
                "without server.admin_keys_file admin routes answer only to requests that name a "
                "loopback address as their host and come from no other web page"
            )

    def _require(self, headers: Headers, digests: list[bytes]) -> None:
        given = _bearer(headers)
        if not _among(given, digests):
            found = "the given one is not known" if given else "none is given"
            raise ApiError(
                401,
                f"an API key is needed and {found}; send the header 'Authorization: Bearer KEY'",
                code="invalid_api_key",
                headers=((b"www-authenticate", b"Bearer"),),
            )


def is_loopback(host: str) -> bool:
    """Whether only the machine itself can reach `host`."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _hostname(host: str) -> str:
    """A Host header without its port."""
    if host.startswith("["):
        return host[1:].partition("]")[0]
    return host.partition(":")[0].lower()


def _bearer(headers: Headers) -> str:
    """The key of a request; "" if there is none or more than one."""
    given = headers.getlist("authorization")
    scheme, _, key = (given[0] if len(given) == 1 else "").partition(" ")
    return key.strip() if scheme.lower() == "bearer" else ""


def _among(key: str, digests: list[bytes]) -> bool:
    """All are compared, so that time tells nothing of which one fits."""
    own = _digest(key)
    found = [hmac.compare_digest(own, digest) for digest in digests]
    return bool(key) and any(found)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode()).digest()


def _forbidden(message: str) -> ApiError:
    return ApiError(403, message, kind="permission_error", code="forbidden")


def _read(knob: str, path: str | None) -> list[str] | None:
    """The keys of a file, one a line; None if none is configured."""
    if path is None:
        return None
    try:
        lines = Path(path).expanduser().read_text(encoding="ascii").splitlines()
    except OSError as error:
        raise ConfigError(f"{knob}: {path} cannot be read ({error.strerror})") from error
    except UnicodeDecodeError:
        raise ConfigError(f"{knob}: {path} is not ASCII text; give one key a line") from None
    keys = [line.strip() for line in lines]
    for number, key in enumerate(keys, 1):
        if len(key) > MAX_KEY_CHARS or len(key.split()) > 1 or not key.isprintable():
            raise ConfigError(
                f"{knob}: line {number} of {path} is no key; a key has at most {MAX_KEY_CHARS} "
                "printable characters and no blanks"
            )
    if not any(keys):
        raise ConfigError(f"{knob}: {path} has no key; give one a line, or null for none")
    return [key for key in keys if key]
