"""Another user of the machine (root becomes it), who tries what must be refused beside a run that goes on."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

STRANGER = """
import json, os, socket, sys, urllib.error, urllib.request
import encodings.idna, http.client
from ray._raylet import GcsClient  # before the user changes: root's interpreter may be where nobody else can read it

facts = json.loads(sys.argv[1])
os.setgroups([]), os.setgid(65534), os.setuid(65534)

def post_a_job(**headers):
    url = f"http://127.0.0.1:{facts['dashboard']}/api/jobs/"
    request = urllib.request.Request(url, json.dumps({"entrypoint": "id"}).encode(), headers)
    try:
        return urllib.request.urlopen(request, timeout=60).status
    except urllib.error.HTTPError as error:
        return error.code

def write_to_the_gcs():
    GcsClient(address=facts["gcs"]).internal_kv_put(b"a", b"b", True, None)

def connect():
    socket.socket(socket.AF_UNIX).connect(facts["session"] + "/sockets/raylet")

attempts = {
    "post a job": lambda: post_a_job(),
    "post a job with a made-up token": lambda: post_a_job(authorization="Bearer " + "0" * 64),
    "write to the GCS": write_to_the_gcs,
    "read the token": lambda: open(facts["private"] + "/token").read(),
    "list the private folder": lambda: os.listdir(facts["private"]),
    "connect to the raylet": connect,
    "plant a link": lambda: os.symlink("/etc/hostname", facts["session"] + "/logs/planted.log"),
    "open the run's lock": lambda: os.open(facts["run"] + "/control/alive", os.O_RDONLY),
    "write a request": lambda: open(facts["run"] + "/control/0.request.json", "w"),
}
became = {}
for name, attempt in attempts.items():
    try:
        became[name] = attempt()
    except Exception as error:
        became[name] = type(error).__name__
os.mkdir(os.environ["TMPDIR"] + "/slipstream-planted")
os.symlink("/etc", os.environ["TMPDIR"] + "/slipstream-link")
print(json.dumps(became, default=repr))
"""
REFUSED = {
    "post a job": 401,
    "post a job with a made-up token": 403,
    "write to the GCS": "AuthenticationError",
    "read the token": "PermissionError",
    "list the private folder": "PermissionError",
    "connect to the raylet": "PermissionError",
    "plant a link": "PermissionError",
    "open the run's lock": "PermissionError",
    "write a request": "PermissionError",
}
"""What comes of the attempts."""


def attempts_beside(said: str, run: Path) -> dict[str, int | str]:
    """What another user's attempts come to. It also leaves slipstream-planted and slipstream-link in TMPDIR.

    Args:
        said: What the run's terminal shows.
        run: The run's folder.
    """
    ((dashboard, token),) = re.findall(r"Ray dashboard: http://127.0.0.1:(\d+) asks for the token in (\S+)", said)
    private = Path(token).parent
    session = (private / "ray" / "session_latest").resolve()
    (port,) = session.glob("gcs_server_port_*")
    facts = {
        "dashboard": dashboard,
        "gcs": f"127.0.0.1:{port.read_text()}",
        "private": str(private),
        "session": str(session),
        "run": str(run.resolve()),
    }
    done = subprocess.run(
        [sys.executable, "-c", STRANGER, json.dumps(facts)],
        env={**os.environ, "RAY_AUTH_MODE": "disabled"},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)
