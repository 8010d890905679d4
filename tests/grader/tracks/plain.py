"""A bare process in a folder: enough of a sandbox to drive the agent where no sandbox of ours is the subject."""

import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from grader.sandbox.base import Ending, Finished


class PlainProcess:
    def __init__(self, argv: Sequence[str], cwd: Path, environment: Mapping[str, str]) -> None:
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        self._process = subprocess.Popen(
            argv,
            cwd=cwd,
            env=environment,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            start_new_session=True,
        )
        self.stdin = self._process.stdin
        self.stdout = self._process.stdout

    @property
    def pid(self) -> int:
        return self._process.pid

    def wait(self, timeout_s: float) -> Finished:
        code = self._process.wait(timeout_s)
        self._log.seek(0)
        text = self._log.read().decode("utf-8", "replace")
        return Finished(ending=Ending.EXITED, exit_code=code, stdout="", stderr=text, truncated=False, duration_s=0.0)

    def kill(self) -> None:
        self._process.kill()


class PlainSandbox:
    kind = "local"
    isolated = False

    def __init__(self) -> None:
        self.path = Path(tempfile.mkdtemp(prefix="plain-"))
        self.path.chmod(0o711)
        self.root = PurePosixPath(self.path)
        self.processes: list[PlainProcess] = []

    def put(self, files: Mapping[str, bytes], *, executable: bool = False, read_only: bool = False) -> None:
        for name, data in files.items():
            target = self.path / name
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(data)
            target.chmod(0o755 if executable else 0o644)

    def start(self, argv: Sequence[str], *, cwd: str = ".", environment: Mapping[str, str] | None = None):
        process = PlainProcess(argv, self.path / cwd, {"PATH": "/usr/bin:/bin", **(environment or {})})
        self.processes.append(process)
        return process

    def close(self) -> None:
        for process in self.processes:
            process.stdin.close()
            process._process.wait(20)
        shutil.rmtree(self.path, ignore_errors=True)
