"""A lab that is held for a minute, for a signal to end it. python -m support.held_lab"""

import time

from benchmarks.namespaces import Lab

if __name__ == "__main__":
    with Lab(2, 1e9):
        print("ready", flush=True)
        time.sleep(60)
