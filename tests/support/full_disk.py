"""A download where files can have 100,000 bytes and no more: prints the error.

python -m support.full_disk URL FOLDER NAME NBYTES SHA256     in tests/
"""

import resource
import sys
from pathlib import Path

from thinwire.tools.train.download import File, Source, fetch

if __name__ == "__main__":
    url, folder, name, nbytes, digest = sys.argv[1:]
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, 100_000))
    try:
        fetch(Source((File(name, int(nbytes), digest),), (url,)), Path(folder), lambda *_: None, print)
    except OSError as error:
        print(error)
