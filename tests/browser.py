"""A real browser, driven over a pipe by Chromium's DevTools protocol: nothing to install but the browser itself."""

import base64
import contextlib
import itertools
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Self

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
# Chromium reads descriptor 3 and writes descriptor 4: put the pipes there, then become it.
_PUT = "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"


class Browser:
    """One tab. Everything that it asks for and everything that goes wrong in it is listed.

    Attributes:
        requests: The addresses of all requests, data URIs left out.
        problems: Errors and warnings of the console, and exceptions.
    """

    def __init__(self, profile: Path) -> None:
        assert CHROMIUM is not None
        self._numbers, self._rest = itertools.count(1), b""
        self.requests: list[str] = []
        self.problems: list[str] = []
        theirs_in, self._out = os.pipe()
        self._in, theirs_out = os.pipe()
        options = ("headless=new", "no-sandbox", "disable-gpu", "disable-dev-shm-usage", "no-first-run", "remote-debugging-pipe",
                   "disable-background-networking", f"user-data-dir={profile}")  # fmt: skip
        line = [sys.executable, "-c", _PUT, str(theirs_in), str(theirs_out), CHROMIUM, *(f"--{option}" for option in options)]
        quiet = subprocess.DEVNULL
        self._process = subprocess.Popen(line, pass_fds=(theirs_in, theirs_out), stdin=quiet, stdout=quiet, stderr=quiet)
        os.close(theirs_in)
        os.close(theirs_out)
        self._session: str | None = None

    @classmethod
    @contextlib.contextmanager
    def open(cls, profile: Path) -> Iterator[Self]:
        browser = cls(profile)
        try:
            target = browser.send("Target.createTarget", url="about:blank")["targetId"]
            browser._session = browser.send("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
            for domain in ("Page", "Runtime", "Log", "Network"):
                browser.send(f"{domain}.enable")
            yield browser
        finally:
            browser.close()

    def close(self) -> None:
        with contextlib.suppress(OSError, TimeoutError):
            self._session = None
            self.send("Browser.close")
        try:
            self._process.wait(10)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        os.close(self._in)
        os.close(self._out)

    def send(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command's answer."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._out, json.dumps(message).encode() + b"\0")
        answer = self._until(lambda found: found.get("id") == number)
        if "error" in answer:
            raise RuntimeError(f"{method}: {answer['error']}")
        return dict(answer["result"])

    def show(self, path: Path, width: int = 1300, height: int = 900, dark: bool = False) -> None:
        """Open a file, as wide as a screen or as a phone, in light or dark colours."""
        phone = width < 600
        size = {"width": width, "height": height, "deviceScaleFactor": 2 if phone else 1, "mobile": phone}
        self.send("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.send("Emulation.setEmulatedMedia", features=[scheme])
        self.send("Page.navigate", url=path.resolve().as_uri())
        while self.ask("document.readyState") != "complete":
            time.sleep(0.01)

    def ask(self, expression: str) -> Any:
        """What an expression of JavaScript gives in the page."""
        answer = self.send("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def click(self, element: str) -> None:
        """A press of the mouse in the middle of what an expression gives."""
        self.ask(f"{element}.scrollIntoView({{block: 'center', inline: 'center', behavior: 'instant'}})")
        where = self.ask(f"(r => [r.x + r.width / 2, r.y + r.height / 2])({element}.getBoundingClientRect())")
        for kind in ("mousePressed", "mouseReleased"):
            self.send("Input.dispatchMouseEvent", type=kind, x=where[0], y=where[1], button="left", clickCount=1)

    def press(self, key: str, text: str = "") -> None:
        """A key of the keyboard."""
        code = {"Tab": 9, "Enter": 13, " ": 32}[key]
        self.send("Input.dispatchKeyEvent", type="keyDown", key=key, text=text, windowsVirtualKeyCode=code)
        self.send("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)

    def picture(self, path: Path) -> None:
        """The whole page, however long."""
        size = self.send("Page.getLayoutMetrics")["cssContentSize"]
        clip = {"x": 0, "y": 0, "width": size["width"], "height": size["height"], "scale": 1}
        data = self.send("Page.captureScreenshot", captureBeyondViewport=True, clip=clip)["data"]
        path.write_bytes(base64.b64decode(data))

    def pdf(self) -> bytes:
        """The page as it is printed."""
        return base64.b64decode(self.send("Page.printToPDF", preferCSSPageSize=True, printBackground=True)["data"])

    def _until(self, wanted: Any, seconds: float = 60.0) -> dict[str, Any]:
        end = time.monotonic() + seconds
        while True:
            while b"\0" not in self._rest:
                if not select.select([self._in], [], [], max(0.0, end - time.monotonic()))[0]:
                    raise TimeoutError("the browser does not answer")
                part = os.read(self._in, 1 << 20)
                if not part:
                    raise OSError("the browser has gone")
                self._rest += part
            line, _, self._rest = self._rest.partition(b"\0")
            message = json.loads(line)
            self._note(message)
            if wanted(message):
                return dict(message)

    def _note(self, message: dict[str, Any]) -> None:
        parameters = message.get("params", {})
        match message.get("method"):
            case "Network.requestWillBeSent" if not parameters["request"]["url"].startswith("data:"):
                self.requests.append(parameters["request"]["url"])
            case "Runtime.exceptionThrown":
                self.problems.append(parameters["exceptionDetails"]["text"])
            case "Runtime.consoleAPICalled":
                self.problems.append(str(parameters["args"]))
            case "Log.entryAdded":
                self.problems.append(parameters["entry"]["text"])
