"""A server that speaks S3, on loopback: moto's, in a process of its own. Nothing is kept after it ends."""

import os
import subprocess
import sys

import pytest
from runs import free_port, is_served, wait_for


@pytest.fixture(scope="module")
def s3():
    """
    The URL of an empty bucket. The variables of the environment with which s3fs finds its server, also in
    runs that inherit them, are set until the tests of a file have ended.
    """
    for name in ("moto", "flask", "s3fs"):
        pytest.importorskip(name)
    port = free_port()
    variables = {
        "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
        "AWS_ACCESS_KEY_ID": "key",
        "AWS_SECRET_ACCESS_KEY": "secret",
        "AWS_DEFAULT_REGION": "us-east-1",
    }
    command = [sys.executable, "-m", "moto.server", "-H", "127.0.0.1", "-p", str(port)]
    server = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    with pytest.MonkeyPatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        try:
            wait_for(lambda: is_served(port) or server.poll() is not None, 120)
            import s3fs

            s3fs.S3FileSystem.clear_instance_cache()  # of a server before
            s3fs.S3FileSystem().mkdir("bucket")
            yield "s3://bucket"
        finally:
            server.kill()
            server.wait()


def environment():
    """The variables that a run needs which does not inherit this process's."""
    return {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
