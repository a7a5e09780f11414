"""Links of a given rate between ranks of this machine, by a relay, which needs no rights (`relay`).

They may have a round-trip time, too: what arrives is then delivered half of it later, in each direction.
"""

LARGEST_WORLD = 64  # Largest number of ranks on one machine
