"""What a launch leaves on a node when not all of its ledger could be copied: neither the secret nor a webhook."""

from __future__ import annotations

import base64
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.environments import scrubbed
from tests.support.waiting import PATIENCE_S, until

WEBHOOK = "token-of-a-webhook"


def test_a_directory_that_stays_behind_holds_neither_secret_nor_webhook(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text("import time\ntime.sleep(1000)\n")
    run = tmp_path / "run"
    argv = [sys.executable, "-m", "resilio_hpc.cli.resilio_launch", "--no-torch", "--standalone", "--notify",
            f"true {WEBHOOK}", "--run-dir", str(run), "train.py"]  # fmt: skip
    with tempfile.TemporaryDirectory() as local, (tmp_path / "out").open("wb") as out:
        environment = scrubbed(RESILIO_LOCAL_DIR=local)
        launch = subprocess.Popen(argv, cwd=tmp_path, stdout=out, stderr=out, env=environment, start_new_session=True)
        said = lambda: (tmp_path / "out").read_text(errors="replace")  # noqa: E731
        try:
            until(lambda: list((run / "logs").glob("*/*/*.log")), "ranks", said, alive=lambda: launch.poll() is None)
            kept = list(Path(local).glob("*/identity.json"))
            assert [path.stat().st_mode & 0o777 for path in kept] == [0o600]
            shutil.move(run / "ledger", tmp_path / "ledger")
            (run / "ledger").symlink_to(tmp_path / "ledger")  # which is not written through
            launch.terminate()
            launch.wait(PATIENCE_S)
        finally:
            launch.kill()
        secret = (run / "secret").read_bytes().strip()
        left = [path for path in Path(local).rglob("*") if path.is_file()]
        assert any(path.suffix == ".jsonl" for path in left), said()
        for path in left:
            content = path.read_bytes()
            for word in (secret, base64.b64encode(secret), WEBHOOK.encode(), base64.b64encode(WEBHOOK.encode())):
                assert word not in content, path
