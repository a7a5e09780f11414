"""Make one text of the C sources of Debian's package linux-source: much to read for a larger GPT.

    apt-get install linux-source-6.1
    python3 benchmarks/linux_text.py /usr/src/linux-source-6.1.tar.xz linux.txt.xz

Files are taken in an order that depends on their names alone, and spreads over all parts of the kernel.
"""

import lzma
import sys
import tarfile
import zlib
from pathlib import Path

MEGABYTES = 130


def main(source: Path, out: Path) -> None:
    files: dict[str, bytes] = {}
    with tarfile.open(source) as archive:
        for member in archive:
            if member.isfile() and member.name.endswith((".c", ".h")):
                file = archive.extractfile(member)
                assert file is not None
                files[member.name] = file.read()
    text = b"".join(files[name] for name in sorted(files, key=lambda name: zlib.crc32(name.encode())))
    text = text[: MEGABYTES * 1_000_000]
    out.write_bytes(lzma.compress(text, preset=6))
    print(f"{len(files):,} files, {len(text):,} bytes of them, {out.stat().st_size:,} bytes in {out}")


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
