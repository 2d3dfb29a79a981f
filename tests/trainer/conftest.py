"""A process group of one, for what talks to its peers: gloo, in this process."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.distributed as dist


@pytest.fixture(scope="session")
def control(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dist.ProcessGroup]:
    store: Path = tmp_path_factory.mktemp("group") / "store"
    dist.init_process_group("gloo", store=dist.FileStore(str(store), 1), rank=0, world_size=1)
    group = dist.group.WORLD
    assert group is not None
    yield group
    dist.destroy_process_group()


@pytest.fixture(autouse=True)
def nothing_compiled_before() -> Iterator[None]:
    """What a test has compiled counts for no other: torch compiles one function for so many kinds of calls, no more."""
    yield
    torch._dynamo.reset()
