"""
A stand-in for llama-server with faults that a real one cannot be made to show.

    fake_llama_server.py --port N [--fault NAME[=VALUE]]...

Without a fault it prints a line, listens, answers `/health` and ends on SIGTERM with status 0, as the real one does.
It uses nothing but the standard library, and takes no part in tests that a real server can serve.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

FAULTS = {
    "silent": "print one line, then spin without a word and never listen",
    "load_s": "load for VALUE seconds with a log line every tenth of a second; 503 from /health, 200 from /v1/models",
    "ignore_term": "take no notice of SIGTERM",
    "term_twice": "end only on the second SIGTERM, with status 1",
    "die": "VALUE is CODE, LINES: print the lines (separated by |), then end with that status before listening",
    "die_after_s": "end with status 9 after VALUE seconds of service",
    "abort": "print VALUE, then abort",
    "long_line": "print a line of VALUE bytes before listening",
    "flood": "print VALUE bytes of lines before listening",
    "broken_byte": "print a byte that is no UTF-8",
    "leave": "start VALUE seconds of sleep in another session, deaf to SIGTERM, with our pipes; its pid is printed",
    "deaf": "answer /health and nothing else",
}


def main() -> int:
    """Do as the arguments say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--fault", action="append", default=[])
    arguments, _ = parser.parse_known_args()
    faults = dict(fault.partition("=")[::2] for fault in arguments.fault)
    unknown = faults.keys() - FAULTS.keys()
    if unknown:
        parser.error(f"no such fault: {unknown}")
    say("fake: starting")
    terms: list[int] = []
    done = threading.Event()

    def on_term(number: int, frame: object) -> None:
        del number, frame
        terms.append(1)
        if "ignore_term" not in faults and ("term_twice" not in faults or len(terms) == 2):
            done.set()

    signal.signal(signal.SIGTERM, on_term)
    if "leave" in faults:
        nap = f"import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); time.sleep({faults['leave']})"
        child = subprocess.Popen([sys.executable, "-c", nap], start_new_session=True)
        say(f"fake: left {child.pid}")
    if "long_line" in faults:
        say("x" * int(faults["long_line"]))
    if "flood" in faults:
        line = "fake: " + "y" * 93
        for _ in range(int(faults["flood"]) // 100):
            say(line)
    if "broken_byte" in faults:
        os.write(2, b"fake: broken \xff byte\n")
    if "die" in faults:
        code, _, lines = faults["die"].partition(",")
        for text in lines.split("|"):
            say(text)
        return int(code)
    if "abort" in faults:
        say(faults["abort"])
        os.abort()
    if "silent" in faults:
        while not done.is_set():
            pass
        return 0
    serve(arguments.port, faults, done)
    return 1 if len(terms) > 1 else 0


def serve(port: int, faults: dict[str, str], done: threading.Event) -> None:
    """Answer requests until told to end."""
    loaded = threading.Event()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if "deaf" in faults and self.path != "/health":
                done.wait()
                return
            if self.path == "/v1/models":
                self.answer(200, {"data": []})
            elif loaded.is_set():
                self.answer(200, {"status": "ok"})
            else:
                self.answer(503, {"error": {"code": 503, "message": "Loading model", "type": "unavailable_error"}})

        def answer(self, status: int, body: object) -> None:
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, format: str, *arguments: object) -> None:
            del format, arguments

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    deadline = time.monotonic() + float(faults.get("load_s", "0"))
    while time.monotonic() < deadline and not done.is_set():
        say("fake: loading")
        time.sleep(0.1)
    loaded.set()
    say(f"fake: listening on {port}")
    if "die_after_s" in faults and not done.wait(float(faults["die_after_s"])):
        say("fake: dying")
        sys.stderr.flush()
        os._exit(9)
    done.wait()
    server.server_close()


def say(text: str) -> None:
    """Print a line to standard error, as llama-server does."""
    sys.stderr.write(text + "\n")
    sys.stderr.flush()


if __name__ == "__main__":
    sys.exit(main())
