"""The claims that a run checks: one line each, PASS or FAIL, with what was seen."""

import time
import traceback


class Claims:
    def __init__(self):
        self.passed = 0
        self.failed = []
        self._started = time.monotonic()

    def section(self, title):
        print(f"\n== {title} ({time.monotonic() - self._started:.0f}s)", flush=True)

    def check(self, claim, holds, evidence=""):
        """Prints and counts one claim. `evidence` is shown in both cases."""
        if holds:
            self.passed += 1
        else:
            self.failed.append(claim)
        print(f"{'PASS' if holds else 'FAIL'}  {claim}", flush=True)
        if evidence != "":
            print(f"      {evidence}", flush=True)
        return bool(holds)

    def note(self, text):
        print(f"note  {text}", flush=True)

    def run(self, title, flow, *arguments):
        """Runs a flow. One that breaks off is a failed claim, and the next flow still runs."""
        self.section(title)
        try:
            flow(self, *arguments)
        except Exception as error:  # noqa: BLE001
            where = traceback.extract_tb(error.__traceback__)
            lines = " < ".join(f"{frame.filename.rsplit('/', 1)[-1]}:{frame.lineno}" for frame in reversed(where[-4:]))
            self.check(f"{title}: runs to its end", False, f"{type(error).__name__}: {error} ({lines})")

    def close(self):
        """Prints the sum and returns the exit status."""
        print(f"\n{self.passed} passed, {len(self.failed)} failed ({time.monotonic() - self._started:.0f}s)")
        for claim in self.failed:
            print(f"  FAIL  {claim}")
        return 1 if self.failed or not self.passed else 0
