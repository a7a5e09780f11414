"""Make one text of the C sources of Debian's package linux-source: much to read for a larger GPT.

    apt-get install linux-source-6.1
    python3 benchmarks/linux_text.py /usr/src/linux-source-6.1.tar.xz linux.txt.xz [--megabytes 130]

Files are taken in an order that depends on their names alone, and spreads over all parts of the kernel.
"""

import argparse
import lzma
import tarfile
import zlib
from pathlib import Path


def main() -> None:
    parser = argparse.ArgumentParser(description="Make one text of Linux' C sources.")
    parser.add_argument("source", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--megabytes", type=int, default=130)
    given = parser.parse_args()
    files: dict[str, bytes] = {}
    with tarfile.open(given.source) as archive:
        for member in archive:
            if member.isfile() and member.name.endswith((".c", ".h")):
                file = archive.extractfile(member)
                assert file is not None
                files[member.name] = file.read()
    text = b"".join(files[name] for name in sorted(files, key=lambda name: zlib.crc32(name.encode())))
    text = text[: given.megabytes * 1_000_000]
    given.out.write_bytes(lzma.compress(text, preset=6))
    print(f"{len(files):,} files, {len(text):,} bytes of them, {given.out.stat().st_size:,} bytes in {given.out}")


if __name__ == "__main__":
    main()
