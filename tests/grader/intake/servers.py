"""Servers for tests: a git configuration that leads an address to a local repository, and HTTP servers that fail."""

import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

ADDRESS = "https://git.example/u/work"


def lead(monkeypatch: pytest.MonkeyPatch, folder: Path, to: str, more: str = "") -> None:
    """Make the user's configuration lead `ADDRESS` to another address."""
    configuration = folder / "gitconfig"
    configuration.write_text(f'[url "{to}"]\n\tinsteadOf = {ADDRESS}\n{more}')
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", str(configuration))
    monkeypatch.setenv("no_proxy", "*")


@contextmanager
def answering(status: int) -> Iterator[str]:
    """Serve every request with one status."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status)
            if status == 401:
                self.send_header("WWW-Authenticate", 'Basic realm="x"')
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}/work"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def silent() -> Iterator[str]:
    """Take connections and never answer."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/work"
