"""What an example says where it can't run. tests/clients runs all of them."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from threading import Thread

EXAMPLES = Path(__file__).parents[1] / "examples"
MESSAGE = "tools: the model's chat template has no place for them"


class Refusing(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        body = json.dumps({"error": {"message": MESSAGE, "type": "invalid_request_error"}}).encode()
        self.send_response(400)
        self.send_header("content-type", "application/json")
        self.send_header("content-length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


@contextmanager
def refusing_server() -> Iterator[str]:
    with HTTPServer(("127.0.0.1", 0), Refusing) as server:
        thread = Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()
        thread.join()


def test_a_model_without_tools_is_a_sentence(tmp_path: Path) -> None:
    with refusing_server() as url:
        text = (EXAMPLES / "tools.py").read_text().replace("http://127.0.0.1:8000", url)
        (tmp_path / "tools.py").write_text(text)
        done = subprocess.run(
            [sys.executable, tmp_path / "tools.py"], capture_output=True, text=True, timeout=120
        )
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.startswith("This example needs a chat template with tools.")
    assert MESSAGE in done.stderr and "Traceback" not in done.stderr
