"""Certificates of a test CA, made with openssl."""

import shutil
import subprocess
from pathlib import Path

import pytest


def make_certificates(folder: Path, names=("server", "trainer"), addresses="DNS:localhost,IP:127.0.0.1") -> Path:
    """``ca.pem``, and NAME.pem with NAME.key of each name, for this machine; the folder."""
    if shutil.which("openssl") is None:
        pytest.skip("no openssl here")

    def run(*arguments):
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    key = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
    run("req", "-x509", *key, "-keyout", "ca.key", "-out", "ca.pem", "-days", "2", "-subj", "/CN=ca")
    (folder / "san").write_text(f"subjectAltName={addresses}\n")
    for name in names:
        run("req", *key, "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        run("x509", "-req", "-in", f"{name}.csr", "-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-days", "2",
            "-extfile", "san", "-out", f"{name}.pem")  # fmt: skip
    return folder
