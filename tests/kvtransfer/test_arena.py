import errno
import mmap
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, multiple, rule

from baton.kvtransfer import arena as arenas
from baton.kvtransfer.arena import Arena, Segment, aligned
from baton.kvtransfer.errors import NoRoom, TransferError

SIZE = 64 * arenas.ALIGN_BYTES


class ArenaMachine(RuleBasedStateMachine):
    extents = Bundle("extents")

    def __init__(self):
        super().__init__()
        self.arena = Arena(1000, SIZE)
        self.held = []

    @rule(target=extents, size=st.integers(1, SIZE + 1))
    def allocate(self, size):
        try:
            extent = self.arena.allocate(size)
        except NoRoom:
            assert self.largest_gap() < size
            return multiple()
        assert extent.offset >= 1000
        assert extent.offset + size <= 1000 + SIZE
        for other in self.held:
            assert (
                extent.offset + size <= other.offset
                or other.offset + other.size_bytes <= extent.offset
            )
        self.held.append(extent)
        return extent

    @rule(extent=consumes(extents))
    def free(self, extent):
        self.arena.free(extent)
        self.held.remove(extent)
        with pytest.raises(ValueError, match="not reserved"):
            self.arena.free(extent)

    def largest_gap(self):
        """Returns the size of the largest range in which no extent is held, in bytes."""
        held = sorted((one.offset, one.offset + aligned(one.size_bytes)) for one in self.held)
        begins = [1000, *(end for _, end in held)]
        ends = [*(begin for begin, _ in held), 1000 + SIZE]
        return max(end - begin for begin, end in zip(begins, ends, strict=True))

    @invariant()
    def tiles(self):
        self.arena.check_integrity()
        assert self.arena.statistics().num_extents == len(self.held)

    def teardown(self):
        for extent in self.held:
            self.arena.free(extent)
        assert self.arena.statistics().used_bytes == 0
        self.arena.check_integrity()
        assert self.arena.allocate(SIZE).offset == 1000


ArenaMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)
TestArena = ArenaMachine.TestCase


def test_a_segment_is_private_shared_and_removed_by_close():
    made = Segment.create(8192)
    path = arenas.SEGMENT_DIRECTORY / made.name
    try:
        assert path.stat().st_mode & 0o777 == 0o600
        opened = Segment.open(made.name)
        opened.memory[5:8] = b"abc"
        assert bytes(made.memory[5:8]) == b"abc"
        opened.close()
        assert path.exists()
    finally:
        made.close()
    assert not path.exists()
    made.close()


def test_only_segments_of_killed_services_are_removed():
    script = (
        "import os, signal\n"
        "from baton.kvtransfer.arena import Segment\n"
        "print(Segment.create(4096).name, flush=True)\n"
        "os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    living = Segment.create(4096)
    try:
        run = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
        left = run.stdout.strip()
        assert os.path.exists(arenas.SEGMENT_DIRECTORY / left)
        assert left in arenas.remove_leftovers()
        assert not os.path.exists(arenas.SEGMENT_DIRECTORY / left)
        assert os.path.exists(arenas.SEGMENT_DIRECTORY / living.name)
    finally:
        living.close()


def test_a_segment_larger_than_shared_memory_is_refused_with_the_sizes():
    with pytest.raises(
        TransferError, match=r"kv_transfer.send_bytes \+ .receive_bytes is .* bytes free"
    ):
        Segment.create(2**60)


@pytest.mark.parametrize(
    ("module", "call", "why"),
    [
        (os, "posix_fallocate", errno.ENOSPC),
        (os, "posix_fallocate", errno.EIO),
        (mmap, "mmap", errno.ENOMEM),
    ],
)
def test_a_failed_segment_leaves_no_file(monkeypatch, tmp_path, module, call, why):
    """Other processes may take the memory after the check of its size."""
    monkeypatch.setattr(arenas, "SEGMENT_DIRECTORY", tmp_path)

    def fails(*_, **__):
        raise OSError(why, os.strerror(why))

    said = r"kv_transfer.send_bytes \+ .receive_bytes is 8192; .* has \d+ bytes free"
    with monkeypatch.context() as patch:
        patch.setattr(module, call, fails)
        with pytest.raises(TransferError, match=said if why == errno.ENOSPC else os.strerror(why)):
            Segment.create(8192)
    assert not list(tmp_path.iterdir())
    opened = [path.readlink() for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
    assert not [path for path in opened if path.is_relative_to(tmp_path)]


def test_only_transfer_segments_can_be_opened():
    with pytest.raises(TransferError, match="must begin with"):
        Segment.open("../etc/passwd")
    with pytest.raises(TransferError, match="No such file"):
        Segment.open("baton-kv-none")
