"""A process with memory that NIXL agents of other processes may read.

    python nixl_owner.py FILE

It reads its memory's content from the file, prints one line of JSON with the agent's metadata (in
hexadecimal), the address and the size, and then writes a zero over each byte of its memory whose
offset it reads from the standard input, one a line; it echoes the line.
"""

import json
import sys
from pathlib import Path

from baton.kvtransfer.transports.nixl_transport import NixlPuller


def main():
    memory = bytearray(Path(sys.argv[1]).read_bytes())
    puller = NixlPuller(memoryview(memory))
    puller.open()
    print(json.dumps([puller.metadata.hex(), puller.address, len(memory)]), flush=True)
    for line in sys.stdin:
        memory[int(line)] = 0
        print(line, end="", flush=True)


if __name__ == "__main__":
    main()
