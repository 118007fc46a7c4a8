"""Shared by the whole suite: one thread per test process, no hub, no network beyond localhost."""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"
sys.path.insert(0, str(Path(__file__).parent))

import pytest
import torch

torch.set_num_threads(1)  # tiny models: a second thread costs more than it brings


@pytest.fixture(autouse=True)
def no_network(monkeypatch):
    """A connection to anywhere but this machine is an error."""
    connect = socket.socket.connect

    def guarded(self, address):
        if self.family != socket.AF_UNIX and address[0] not in ("127.0.0.1", "localhost", "::1"):
            raise RuntimeError(f"tests must not use the network, and one connected to {address}")
        return connect(self, address)

    monkeypatch.setattr(socket.socket, "connect", guarded)
