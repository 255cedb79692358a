"""A headless Chromium, controlled over a pipe with its debugging protocol.

:class:`Browser` opens a file on a screen of a given size (a phone's if the screen is narrow), evaluates JavaScript
expressions, and receives keys as from a keyboard. It needs only the program ``chromium``.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium")
_OPTIONS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-sync"),
    *("--disable-background-networking", "--disable-component-update", "--remote-debugging-pipe"),
)
_MOST_S = 60.0  # for one answer, on a busy machine
_KEYS = {"Tab": (9, ""), "Enter": (13, "\r"), " ": (32, " "), "ArrowRight": (39, "")}


class Browser:
    """One page of a browser. Use :func:`browser`, which ends it."""

    def __init__(self, to_it: int, from_it: int) -> None:
        self._to, self._from, self._number, self._session = to_it, from_it, 0, ""
        self._rest = b""
        target = self._do("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._do("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]

    def _do(self, method: str, **arguments: Any) -> Any:
        self._number += 1
        message = {"id": self._number, "method": method, "params": arguments}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return answer["result"]

    def _read(self) -> Any:
        end = time.monotonic() + _MOST_S
        while b"\0" not in self._rest:
            if not select.select([self._from], [], [], max(0.0, end - time.monotonic()))[0]:
                raise TimeoutError("the browser gave no answer")
            more = os.read(self._from, 1 << 16)
            if not more:
                raise EOFError("the browser has ended")
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def open(self, path: Path, width: int, *, dark: bool = False) -> None:
        """Shows a file on a screen of this width in pixels, and waits until it is loaded."""
        is_phone = width < 500
        screen = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": is_phone}
        self._do("Emulation.setDeviceMetricsOverride", **screen)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self._do("Emulation.setEmulatedMedia", features=[scheme])
        self._do("Emulation.setFocusEmulationEnabled", enabled=True)
        self._do("Emulation.setTouchEmulationEnabled", enabled=is_phone)
        self._do("Page.navigate", url=path.as_uri())
        self.wait_for(f"location.href + document.readyState === {path.as_uri() + 'complete'!r}")

    def ask(self, expression: str) -> Any:
        """The value of an expression in JavaScript."""
        found = self._do("Runtime.evaluate", expression=expression, returnByValue=True)
        if "exceptionDetails" in found:
            raise RuntimeError(f"{expression}: {found['exceptionDetails']}")
        return found["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Waits until an expression is true."""
        end = time.monotonic() + _MOST_S
        while not self.ask(expression):
            if time.monotonic() > end:
                raise TimeoutError(f"never true: {expression}")
            time.sleep(0.05)

    def press(self, key: str) -> None:
        code, text = _KEYS[key]
        pressed = {"key": key, "code": key.strip() or "Space", "windowsVirtualKeyCode": code}
        self._do("Input.dispatchKeyEvent", type="keyDown", text=text, **pressed)
        self._do("Input.dispatchKeyEvent", type="keyUp", **pressed)


@contextlib.contextmanager
def browser() -> Iterator[Browser]:
    """A browser with its own profile, which ends with the block."""
    assert PROGRAM is not None
    its_input, to_it = os.pipe()
    from_it, its_output = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        # It reads from descriptor 3 and writes to 4.
        wires = f'exec "$@" 3<&{its_input} 4>&{its_output}'
        command = ["bash", "-c", wires, "bash", PROGRAM, *_OPTIONS, f"--user-data-dir={folder}"]
        process = subprocess.Popen(
            command, pass_fds=(its_input, its_output), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
        )
        os.close(its_input)
        os.close(its_output)
        try:
            yield Browser(to_it, from_it)
        finally:
            os.close(to_it)
            os.close(from_it)
            process.terminate()
            try:
                process.wait(30)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
